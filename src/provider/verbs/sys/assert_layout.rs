//! Sizes and offsets, checked when compiling.

/// `Type: size, alignment { field: offset, .. }`, where `A | B` is A on x86_64 and B on aarch64.
macro_rules! layouts {
    ($($name:ident: $size:literal $(| $size_a:literal)?, $align:literal $(| $align_a:literal)? {
        $($field:ident: $offset:literal $(| $offset_a:literal)?,)*
    })*) => {
        $(const _: () = {
            assert!(size_of::<$name>() == pick!($size $(, $size_a)?));
            assert!(align_of::<$name>() == pick!($align $(, $align_a)?));
            $(assert!(std::mem::offset_of!($name, $field) == pick!($offset $(, $offset_a)?));)*
        };)*

        /// The same for the tests, which ask a C compiler.
        #[cfg(test)]
        pub(super) const LAYOUTS: &[super::assert_layout::Layout] = &[$(super::assert_layout::Layout {
            name: stringify!($name),
            size: size_of::<$name>(),
            align: align_of::<$name>(),
            fields: &[$((stringify!($field), std::mem::offset_of!($name, $field)),)*],
        },)*];
    };
}

macro_rules! pick {
    ($everywhere:literal) => {
        $everywhere
    };
    ($x86_64:literal, $aarch64:literal) => {
        if cfg!(target_arch = "aarch64") { $aarch64 } else { $x86_64 }
    };
}

pub(super) use {layouts, pick};

#[cfg(test)]
pub(super) struct Layout {
    pub name: &'static str,
    pub size: usize,
    pub align: usize,
    pub fields: &'static [(&'static str, usize)],
}
