//! Status codes.

use std::ffi::{CStr, c_char};

use super::{Out, driver};

/// A status that is not success.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Code(pub(super) u32);

pub(super) type Result<T = ()> = std::result::Result<T, Code>;

macro_rules! codes {
    ($($name:ident = $code:literal: $text:literal;)*) => {
        #[allow(dead_code, reason = "some are only for tests to inject")]
        impl Code {
            $(pub(super) const $name: Self = Self($code);)*
        }

        /// A status's meaning.
        fn describe(code: u32) -> Option<&'static CStr> {
            match code {
                $($code => Some($text),)*
                _ => None,
            }
        }

        /// A status's full name.
        fn name(code: u32) -> Option<&'static CStr> {
            let name = match code {
                0 => "CUDA_SUCCESS\0",
                $($code => concat!("CUDA_ERROR_", stringify!($name), "\0"),)*
                _ => return None,
            };
            CStr::from_bytes_with_nul(name.as_bytes()).ok()
        }
    };
}

codes! {
    INVALID_VALUE = 1: c"an argument is out of its range";
    OUT_OF_MEMORY = 2: c"no memory is left";
    NOT_INITIALIZED = 3: c"cuInit has not been called";
    NO_DEVICE = 100: c"there is no device";
    INVALID_DEVICE = 101: c"there is no such device";
    INVALID_IMAGE = 200: c"this is no kernel image";
    INVALID_CONTEXT = 201: c"the thread has no context";
    FILE_NOT_FOUND = 301: c"there is no such file";
    INVALID_HANDLE = 400: c"a handle is of no object";
    NOT_FOUND = 500: c"there is no object of this name";
    NOT_READY = 600: c"the operation has not finished";
    ILLEGAL_ADDRESS = 700: c"a kernel touched an address that it may not touch";
    CONTEXT_IS_DESTROYED = 709: c"the context has been destroyed";
    HOST_MEMORY_ALREADY_REGISTERED = 712: c"part of the memory is registered already";
    HOST_MEMORY_NOT_REGISTERED = 713: c"the memory is not registered";
    MISALIGNED_ADDRESS = 716: c"a kernel touched an address that is not aligned";
    LAUNCH_FAILED = 719: c"a kernel has failed";
    NOT_PERMITTED = 800: c"the operation is not permitted";
    NOT_SUPPORTED = 801: c"the device or driver does not support this";
    UNKNOWN = 999: c"nobody knows what went wrong";
}

driver! {
    fn cuGetErrorName(code: u32, name_out: Out<*const c_char>) {
        let found = name(code);
        name_out.put(found.map_or(std::ptr::null(), CStr::as_ptr))?;
        found.map(|_| ()).ok_or(Code::INVALID_VALUE)
    }

    fn cuGetErrorString(code: u32, text_out: Out<*const c_char>) {
        let found = if code == 0 { Some(c"no error") } else { describe(code) };
        text_out.put(found.map_or(std::ptr::null(), CStr::as_ptr))?;
        found.map(|_| ()).ok_or(Code::INVALID_VALUE)
    }
}
