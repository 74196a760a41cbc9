//! Sharing with other processes, which this driver does not do.

use super::{Code, driver};

driver! {
    fn cuIpcGetMemHandle(_handle: usize, _address: u64) {
        Err(Code::NOT_SUPPORTED)
    }

    // The handle of 64 bytes is passed by value: behind the other arguments, out of their way.
    fn cuIpcOpenMemHandle_v2(_address: usize) {
        Err(Code::NOT_SUPPORTED)
    }

    fn cuIpcCloseMemHandle(_address: u64) {
        Err(Code::NOT_SUPPORTED)
    }

    fn cuIpcGetEventHandle(_handle: usize, _event: usize) {
        Err(Code::NOT_SUPPORTED)
    }

    fn cuIpcOpenEventHandle(_event: usize) {
        Err(Code::NOT_SUPPORTED)
    }
}
