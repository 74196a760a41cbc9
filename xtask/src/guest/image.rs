//! The guest's initramfs.

use std::collections::BTreeSet;
use std::env::consts::ARCH;
use std::fs;
use std::os::unix::fs::PermissionsExt;

use anyhow::{Context, Result};
use cargo_metadata::camino::{Utf8Path, Utf8PathBuf};

use super::name_of;
use crate::command::Command;

/// Modules, each with what it depends on. `rdma_rxe` wants crc32, which is not among its dependencies; the second is the
/// fast one, which the kernel would choose on a machine of its own.
const MODULES: &str = "crc32_generic crc32_pclmul veth rdma_rxe rdma_ucm ib_uverbs rdma_cm";

/// Drivers of devices that not every guest has: a job that has them loads these.
const DRIVERS: &str = "virtio_pci virtio_net";

/// Loaded by name at run time, so no program's list of libraries has them.
const LIBRARIES: [&str; 2] = ["libibverbs.so.1", "librdmacm.so.1"];

/// Soft-RoCE on both ends of a virtual cable. busybox's own `ip` knows no veth, so the real one goes by its path.
const INIT: &str = r#"#!/bin/busybox sh
/bin/busybox --install -s /bin
export PATH=/sbin:/bin
mount -t proc proc /proc; mount -t sysfs sys /sys; mount -t devtmpfs dev /dev
mkdir -p /dev/shm; mount -t tmpfs shm /dev/shm; mount -t tmpfs tmp /tmp
for module in $(cat /modules/order); do insmod /modules/$module || echo "guest: no module $module"; done
/sbin/ip link set lo up
/sbin/ip link add veth0 type veth peer name veth1
for end in 0 1; do
  /sbin/ip addr add 10.1.1.$((end + 1))/24 dev veth$end
  /sbin/ip link set veth$end up
done
rdma link add rxe0 type rxe netdev veth0
rdma link add rxe1 type rxe netdev veth1
ulimit -l unlimited; ulimit -n 65536
export TOKIO_RDMA_TEST_NIC=rxe0@10.1.1.1 TOKIO_RDMA_TEST_REMOVABLE=rxe1@10.1.1.2@veth1
# Link-local addresses are not usable before their duplicates were looked for.
sleep 1
echo "guest: up"
sh /job
echo "guest: done"
poweroff -f
"#;

pub struct Image {
    pub kernel: Utf8PathBuf,
    pub initramfs: Utf8PathBuf,
}

/// `tools` are programs of this machine, by name; the guest finds them by that name too.
pub fn build(dir: &Utf8Path, programs: &[Utf8PathBuf], tools: &[&str], job: &str) -> Result<Image> {
    let version = kernel_version()?;
    fs::create_dir_all(dir)?;
    let root = dir.join("root");
    if root.exists() {
        fs::remove_dir_all(&root)?;
    }
    for folder in ["bin", "sbin", "proc", "sys", "dev", "tmp", "run", "modules", "programs", "etc/libibverbs.d"] {
        fs::create_dir_all(root.join(folder))?;
    }
    copy(Utf8Path::new("/bin/busybox"), &root.join("bin/busybox"))?;
    copy_modules(&root, &version, MODULES, "order")?;
    copy_modules(&root, &version, DRIVERS, "drivers")?;
    let mut libraries = BTreeSet::new();
    for tool in ["rdma", "ip"].iter().chain(tools) {
        let tool = Utf8PathBuf::from(Command::new("sh -c").arg(format!("command -v {tool}")).stdout()?.trim());
        copy(&tool, &root.join("sbin").join(name_of(&tool)?))?;
        add_libraries(&tool, &mut libraries)?;
    }
    for program in programs {
        let copied = root.join("programs").join(name_of(program)?);
        Command::new("strip --strip-debug -o").arg(&copied).arg(program).run()?;
        add_libraries(program, &mut libraries)?;
    }
    let system = Utf8PathBuf::from(format!("/usr/lib/{ARCH}-linux-gnu"));
    let rxe = system.join("libibverbs").read_dir_utf8()?.flatten().find(|file| file.file_name().starts_with("librxe"));
    let rxe = rxe.context("rdma-core's provider for Soft-RoCE")?.into_path();
    for library in LIBRARIES.map(|name| system.join(name)).into_iter().chain([rxe]) {
        add_libraries(&library, &mut libraries)?;
        libraries.insert(library);
    }
    for library in &libraries {
        let place = root.join(library.as_str().trim_start_matches('/'));
        fs::create_dir_all(place.parent().context("a library without a folder")?)?;
        copy(library, &place)?;
    }
    fs::write(root.join("etc/libibverbs.d/rxe.driver"), "driver rxe\n")?;
    fs::write(root.join("job"), job)?;
    fs::write(root.join("init"), INIT)?;
    fs::set_permissions(root.join("init"), fs::Permissions::from_mode(0o755))?;
    let initramfs = dir.join("initramfs");
    Command::new("sh -c").arg(format!("find . | cpio --quiet -o -H newc > '{initramfs}'")).dir(&root).run()?;
    Ok(Image { kernel: format!("/boot/vmlinuz-{version}").into(), initramfs })
}

/// The newest kernel whose image and modules are both installed.
pub fn kernel_version() -> Result<String> {
    let versions = Command::new("sh -c").arg("ls -1 /lib/modules | sort -V").stdout()?;
    let found = versions.lines().rev().find(|version| Utf8Path::new(&format!("/boot/vmlinuz-{version}")).exists());
    Ok(found.context("no kernel image with modules is installed")?.to_owned())
}

/// Copies modules, and writes a list of them in the order in which to load them.
fn copy_modules(root: &Utf8Path, version: &str, modules: &str, list: &str) -> Result<()> {
    let mut order = Vec::new();
    for module in modules.split_whitespace() {
        let depends = Command::new("modprobe --show-depends --set-version").arg(version).arg(module).stdout()?;
        for file in depends.lines().filter_map(|line| line.strip_prefix("insmod ")) {
            let file = Utf8Path::new(file.trim());
            let name = name_of(file)?.to_owned();
            if !order.contains(&name) {
                copy(file, &root.join("modules").join(&name))?;
                order.push(name);
            }
        }
    }
    fs::write(root.join("modules").join(list), order.join("\n"))?;
    Ok(())
}

/// What `ldd` finds.
fn add_libraries(program: &Utf8Path, libraries: &mut BTreeSet<Utf8PathBuf>) -> Result<()> {
    let found = Command::new("ldd").arg(program).finish()?;
    libraries.extend(
        found
            .text
            .split_whitespace()
            .filter(|word| word.starts_with('/'))
            .map(|word| Utf8PathBuf::from(word.trim_end_matches(':'))),
    );
    Ok(())
}

fn copy(from: &Utf8Path, to: &Utf8Path) -> Result<()> {
    fs::copy(from, to).with_context(|| format!("copy {from} to {to}"))?;
    Ok(())
}
