//! How functions are exported.

use super::{Code, Result, hooks};

/// Where a caller wants an answer: null, or a place for a `T`.
#[repr(transparent)]
#[derive(Clone, Copy)]
pub(super) struct Out<T>(*mut T);

impl<T> Out<T> {
    /// Writes the answer. Null is an invalid value.
    pub(super) fn put(self, value: T) -> Result {
        if self.0.is_null() {
            return Err(Code::INVALID_VALUE);
        }
        // SAFETY: not null, so by the driver API's contract a place for a `T`, perhaps not aligned.
        unsafe { self.0.write_unaligned(value) };
        Ok(())
    }

    /// Writes the answer, if the caller wants it.
    pub(super) fn put_if_wanted(self, value: T) -> Result {
        if self.0.is_null() { Ok(()) } else { self.put(value) }
    }
}

impl Out<u8> {
    /// The same place, for a value of another type.
    pub(super) fn cast<T>(self) -> Out<T> {
        Out(self.0.cast())
    }
}

/// What a caller passes by address: null, or values of `T`.
#[repr(transparent)]
#[derive(Clone, Copy)]
pub(super) struct In<T>(*const T);

impl<T: Copy> In<T> {
    /// One of the values. The caller must have promised as many; null is an invalid value.
    pub(super) fn get(self, index: usize) -> Result<T> {
        if self.0.is_null() {
            return Err(Code::INVALID_VALUE);
        }
        // SAFETY: not null, so by the driver API's contract as many values as its functions read, perhaps not aligned.
        Ok(unsafe { self.0.add(index).read_unaligned() })
    }
}

impl Out<std::ffi::c_char> {
    /// Writes a string that ends in a zero, cut to the `len` bytes that there are.
    pub(super) fn put_string(self, text: &str, len: i32) -> Result {
        let room = usize::try_from(len).ok().and_then(|len| len.checked_sub(1)).ok_or(Code::INVALID_VALUE)?;
        for (at, byte) in text.bytes().take(room).chain([0]).enumerate() {
            Out(self.0.wrapping_add(at)).put(byte as std::ffi::c_char)?;
        }
        Ok(())
    }
}

/// Runs the body of the function `name`, unless a test wants it to fail.
pub(super) fn answer(name: &'static str, body: impl FnOnce() -> Result) -> u32 {
    match hooks::enter(name).and_then(|()| body()) {
        Ok(()) => 0,
        Err(Code(code)) => code,
    }
}

/// Exports functions of the driver API. The body's result becomes the status.
macro_rules! driver {
    ($(fn $name:ident($($argument:ident: $type:ty),* $(,)?) $body:block)*) => {$(
        #[unsafe(no_mangle)]
        #[allow(non_snake_case, reason = "the names are NVIDIA's")]
        extern "C" fn $name($($argument: $type),*) -> u32 {
            $crate::driver::export::answer(stringify!($name), || $body)
        }
    )*};
}
pub(super) use driver;
