//! Loads a library once, and says in plain words why it could not be.

use std::fmt;

/// Why a library, or a symbol of it, is not there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct LoadError {
    pub(crate) library: String,
    pub(crate) symbol: Option<&'static str>,
    /// The loader's words.
    pub(crate) text: String,
}

impl fmt::Display for LoadError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.symbol {
            None => write!(f, "cannot load {}: {}", self.library, self.text),
            Some(symbol) => write!(f, "{} has no symbol {symbol}: {}", self.library, self.text),
        }
    }
}

impl std::error::Error for LoadError {}

/// Declares the table of a library's functions. A symbol that is missing is an error when it is required, and `None` when it is
/// optional: nothing ever calls a function that is not there.
macro_rules! library {
    ($(#[$doc:meta])* $name:ident = $file:literal;
        required: $(fn $required:ident($($argument:ident: $type:ty),*) $(-> $returns:ty)?;)*
        optional: $(fn $optional:ident($($argument_o:ident: $type_o:ty),*) $(-> $returns_o:ty)?;)*
    ) => {
        $(#[$doc])*
        ///
        /// Invariant: each pointer is the symbol of its name in the library, which is never unloaded.
        pub(crate) struct $name {
            $(pub(crate) $required: unsafe extern "C" fn($($argument: $type),*) $(-> $returns)?,)*
            $(pub(crate) $optional: Option<unsafe extern "C" fn($($argument_o: $type_o),*) $(-> $returns_o)?>,)*
        }

        impl std::fmt::Debug for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str($file)
            }
        }

        impl $name {
            /// The library, loaded by whoever asks first.
            pub(crate) fn get() -> Result<&'static Self, &'static super::load::LoadError> {
                use std::sync::OnceLock;
                static LOADED: OnceLock<Result<$name, super::load::LoadError>> = OnceLock::new();
                LOADED.get_or_init(|| $name::load($file)).as_ref()
            }

            pub(super) fn load(file: &str) -> Result<Self, super::load::LoadError> {
                let failed = |symbol, error: libloading::Error| super::load::LoadError {
                    library: file.to_owned(),
                    symbol,
                    text: error.to_string(),
                };
                // SAFETY: the initialisers of rdma-core's libraries have no requirements.
                let library = unsafe { libloading::Library::new(file) }.map_err(|error| failed(None, error))?;
                let table = Self {
                    $($required: {
                        let name = concat!(stringify!($required), "\0");
                        // SAFETY: the headers declare the symbol with this signature, and the ABI only ever grows.
                        *unsafe { library.get(name.as_bytes()) }
                            .map_err(|error| failed(Some(stringify!($required)), error))?
                    },)*
                    $($optional: {
                        let name = concat!(stringify!($optional), "\0");
                        // SAFETY: as above.
                        unsafe { library.get(name.as_bytes()) }.ok().map(|symbol| *symbol)
                    },)*
                };
                // The pointers are good for as long as the process runs.
                std::mem::forget(library);
                Ok(table)
            }
        }
    };
}

pub(super) use library;
