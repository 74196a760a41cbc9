//! Debian's packages of older Rust releases, unpacked into a directory of ours: nothing is installed.
//!
//! They serve two steps on a machine whose rustup has one toolchain only: the promise of `rust-version`, and the thread
//! sanitizer, which needs the source of std.

use std::env::consts::ARCH;
use std::fs;
use std::os::unix::fs::PermissionsExt;

use anyhow::{Context, Result};
use cargo_metadata::camino::{Utf8Path, Utf8PathBuf};

use super::tools::{Toolchain, Tools, works};
use crate::command::Command;

/// In front of the version, in the name of a release's folder.
const RELEASE: &str = "debian-rustc-";

/// As above, where there is all that the thread sanitizer needs.
const SANITIZING: &str = "debian-rust-";

pub struct Rust {
    dir: Utf8PathBuf,
}

impl Rust {
    /// The release with this version, for example `1.85`; the newest where none is named. Unpacked where it has not been
    /// yet; `None` where Debian does not have it, or nothing may be fetched.
    pub fn find(tools: &Tools, tools_dir: &Utf8Path, version: Option<&str>) -> Result<Option<Self>> {
        if !works("apt-get --version") {
            return Ok(None);
        }
        let mut package = package_version(version)?;
        if package.is_none() && tools.may_install() && tools.is_root() {
            tools.apt_update()?;
            package = package_version(version)?;
        }
        let Some(package) = package else { return Ok(None) };
        // The source of std, most of what there is to unpack, is for the newest alone: the sanitizer needs it.
        let (name, parts) = match version {
            Some(_) => (RELEASE, &["rustc-web", "libstd-rust-web-dev"][..]),
            None => (SANITIZING, &["rustc-web", "libstd-rust-web-dev", "rust-web-src"][..]),
        };
        let rust = Self { dir: tools_dir.join(format!("{name}{package}")) };
        if !rust.wrapper().exists() {
            if !tools.may_install() {
                return Ok(None);
            }
            rust.unpack(&package, parts, version.is_none())?;
        }
        Ok(Some(rust))
    }

    /// cargo of the default toolchain with this compiler.
    pub fn toolchain(&self) -> Toolchain {
        Toolchain { env: vec![("RUSTC", self.wrapper().into())] }
    }

    fn unpack(&self, package: &str, parts: &[&str], sanitizes: bool) -> Result<()> {
        let version: Vec<_> = package.splitn(3, '.').take(2).collect();
        let std = format!("libstd-rust-web-{}", version.join("."));
        let depends = Command::new("apt-cache depends").arg(format!("{std}={package}")).stdout()?;
        let llvm = depends.split_whitespace().find_map(|word| word.strip_prefix("libllvm"));
        let llvm = llvm.context("the LLVM that Debian's std depends on")?;
        let (archives, root) = (self.dir.join("archives"), self.dir.join("root"));
        fs::create_dir_all(&archives)?;
        fs::create_dir_all(&root)?;
        let named: Vec<_> = parts.iter().chain([&&*std]).map(|name| format!("{name}={package}")).collect();
        let runtime = if sanitizes { format!("libclang-rt-{llvm}-dev") } else { String::new() };
        Command::new("apt-get download --quiet -o APT::Sandbox::User=root")
            .args(&named.join(" "))
            .args(&runtime)
            .args(&missing_libraries(&named)?.join(" "))
            .dir(&archives)
            .run()?;
        for archive in archives.read_dir_utf8()? {
            Command::new("dpkg-deb --extract").arg(archive?.path()).arg(&root).run()?;
        }
        fs::remove_dir_all(&archives)?;

        if sanitizes {
            // rustc looks for the runtime beside std, under a name of its own.
            let runtime = format!("usr/lib/llvm-{llvm}/lib/clang/{llvm}/lib/linux/libclang_rt.tsan-{ARCH}.a");
            let beside_std = format!("usr/lib/rustlib/{ARCH}-unknown-linux-gnu/lib/librustc-stable_rt.tsan.a");
            fs::copy(root.join(&runtime), root.join(beside_std)).with_context(|| format!("copy {runtime}"))?;
        }
        self.write_wrapper(&root)
    }

    /// Adds std for the other architecture that this crate is for, so that what is only compiled there is compiled. `false` where
    /// nothing may be fetched.
    pub fn add_target(&self, tools: &Tools, debian: &str, target: &str) -> Result<bool> {
        let root = self.dir.join("root");
        if root.join("usr/lib/rustlib").join(target).exists() {
            return Ok(true);
        }
        if !tools.may_install() || !tools.is_root() {
            return Ok(false);
        }
        let package = self.dir.file_name().and_then(|name| name.strip_prefix(RELEASE)).context("a version")?;
        let archives = self.dir.join("archives");
        fs::create_dir_all(&archives)?;
        // For these two calls only: the system goes on without the other architecture.
        let apt = || {
            let native = Command::new("apt-get -o APT::Sandbox::User=root -o").arg("APT::Architectures::=amd64");
            native.args("-o").arg(format!("APT::Architectures::={debian}"))
        };
        apt().args("update --quiet").run()?;
        apt().args("download --quiet").arg(format!("libstd-rust-web-dev:{debian}={package}")).dir(&archives).run()?;
        for archive in archives.read_dir_utf8()? {
            Command::new("dpkg-deb --extract").arg(archive?.path()).arg(&root).run()?;
        }
        fs::remove_dir_all(&archives)?;
        Ok(true)
    }

    /// The libraries are where the system's loader does not look. Written last, when the compiler has run: it tells
    /// that all is there.
    fn write_wrapper(&self, root: &Utf8Path) -> Result<()> {
        let libraries = format!("{root}/usr/lib/{ARCH}-linux-gnu:{root}/lib/{ARCH}-linux-gnu");
        let rustc = root.join("usr/bin/rustc");
        Command::new("").arg(&rustc).arg("--version").env("LD_LIBRARY_PATH", &libraries).run()?;
        let script = format!("#!/bin/sh\nexport LD_LIBRARY_PATH='{libraries}'\nexec '{rustc}' \"$@\"\n");
        fs::write(self.wrapper(), script)?;
        fs::set_permissions(self.wrapper(), fs::Permissions::from_mode(0o755))?;
        Ok(())
    }

    fn wrapper(&self) -> Utf8PathBuf {
        self.dir.join("rustc")
    }
}

/// What else apt would have to install for these, each `NAME=VERSION`: libraries that this machine lacks.
fn missing_libraries(named: &[String]) -> Result<Vec<String>> {
    let plan = Command::new("apt-get install --print-uris -qq --reinstall --no-install-recommends");
    let plan = plan.args(&named.join(" ")).stdout()?;
    let files = plan.lines().filter_map(|line| line.split_whitespace().nth(1));
    let names = files.filter_map(|file| file.split('_').next());
    let others = names.filter(|name| !named.iter().any(|it| it.starts_with(&format!("{name}="))));
    Ok(others.map(str::to_owned).collect())
}

/// The full version of the package with this Rust version, for example `1.85.0+dfsg3-1` for `1.85`.
fn package_version(version: Option<&str>) -> Result<Option<String>> {
    // From new to old.
    let table = Command::new("apt-cache madison rustc-web").stdout()?;
    let mut versions = table.lines().filter_map(|line| line.split('|').nth(1)).map(str::trim);
    let wanted = version.map(|version| format!("{version}.")).unwrap_or_default();
    Ok(versions.find(|found| found.starts_with(&wanted)).map(str::to_owned))
}
