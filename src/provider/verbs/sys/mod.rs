//! libibverbs and librdmacm, as their headers declare them, loaded at run time.
//!
//! `types`, `constants`, `functions` and `layout` are written by `cargo xtask bindings` and checked in: building this crate
//! takes a Rust compiler and a linker. C enums are integers with constants, since a newer library may use new values.
//! The ABI is append-only: structures that the library fills are never larger here than there.

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
compile_error!("the layout of libibverbs' structures is only known for x86_64 and aarch64");

mod assert_layout;
#[allow(missing_docs, dead_code)]
mod constants;
#[allow(missing_docs)]
mod functions;
mod inline;
#[rustfmt::skip]
mod layout;
mod load;
#[allow(missing_docs, non_camel_case_types, dead_code)]
mod types;

pub(super) use self::constants::*;
pub(super) use self::functions::{Cm, Verbs};
pub(super) use self::inline::*;
pub(super) use self::load::LoadError;
pub(super) use self::types::*;

#[cfg(test)]
mod tests;
