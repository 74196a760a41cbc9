//! A folder that looks like sysfs.

use std::fs;
use std::io;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

pub struct Tree(PathBuf);

impl Tree {
    pub fn new(root: &Path) -> Self {
        Self(root.to_owned())
    }

    /// Writes a file, and makes the folders above it.
    pub fn file(&self, path: impl AsRef<Path>, content: impl AsRef<[u8]>) -> io::Result<()> {
        let path = self.0.join(path);
        fs::create_dir_all(path.parent().unwrap_or(&self.0))?;
        fs::write(path, content)
    }

    /// Makes a link from `path` to `target`, both below the root.
    pub fn link(&self, path: impl AsRef<Path>, target: &str) -> io::Result<()> {
        let path = path.as_ref();
        let link = self.0.join(path);
        fs::create_dir_all(link.parent().unwrap_or(&self.0))?;
        let up = "../".repeat(path.components().count() - 1);
        match symlink(format!("{up}{target}"), &link) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
            other => other,
        }
    }

    /// A PCI function at a place like `pci0000:00/0000:00:01.0/0000:01:00.0`, with these attributes.
    pub fn function(&self, place: &str, attributes: &[(&str, &str)]) -> io::Result<()> {
        let address = place.rsplit('/').next().unwrap_or(place);
        fs::create_dir_all(self.0.join("devices").join(place))?;
        for (name, value) in attributes {
            self.file(format!("devices/{place}/{name}"), format!("{value}\n"))?;
        }
        self.link(format!("bus/pci/devices/{address}"), &format!("devices/{place}"))
    }

    /// An RDMA device, of a PCI function or of none, without ports.
    pub fn nic(&self, name: &str, function: Option<&str>) -> io::Result<()> {
        fs::create_dir_all(self.0.join("class/infiniband").join(name))?;
        match function {
            Some(address) => {
                self.link(format!("class/infiniband/{name}/device"), &format!("bus/pci/devices/{address}"))
            }
            None => Ok(()),
        }
    }

    /// A port of an RDMA device.
    pub fn port(&self, nic: &str, number: u32, state: &str, rate: Option<&str>) -> io::Result<()> {
        let port = format!("class/infiniband/{nic}/ports/{number}");
        self.file(format!("{port}/state"), format!("{state}\n"))?;
        match rate {
            Some(rate) => self.file(format!("{port}/rate"), format!("{rate}\n")),
            None => Ok(()),
        }
    }
}
