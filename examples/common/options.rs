//! What the command lines of several examples have in common.

use anyhow::{Context, Result, bail};
use tokio_rdma::{Address, Device};

/// The device with this name, or the default one.
pub fn open_device(name: Option<&str>) -> Result<Device> {
    name.map_or_else(Device::open_default, Device::open).context("open the device")
}

/// Where the server is, which `who` ("a client", say) has to be told.
pub fn server_address<'a>(who: &str, address: Option<&'a Address>) -> Result<&'a Address> {
    match address {
        None => bail!("{who} needs --address, as the server printed it"),
        Some(Address::Ip(address)) if address.port() == 0 => bail!("{who} needs the port that the server printed"),
        Some(address) => Ok(address),
    }
}
