//! `cargo xtask bindings`: writes the checked-in bindings of libibverbs and librdmacm anew.
//!
//! Only needed to add a symbol: name it below, run this, review the difference. It wants bindgen, libclang, the headers, and
//! aarch64's C headers (Debian: libclang-dev libibverbs-dev librdmacm-dev libc6-dev-arm64-cross).
//!
//! The headers are read once per architecture. The types must come out the same; where sizes or offsets differ
//! (`pthread_mutex_t` does), the layout table gets both values.

use std::collections::HashMap;
use std::fmt::Write;
use std::fs;
use std::process::ExitCode;

use anyhow::{Context, Result, bail, ensure};

use crate::command::Command;
use crate::workspace::Workspace;

const BINDGEN: &str = "0.72.1";
const OUT: &str = "src/provider/verbs/sys";

/// Symbols of libibverbs that every rdma-core has which is still in use.
const VERBS: &str = "ibv_get_device_list ibv_free_device_list ibv_get_device_name ibv_open_device ibv_close_device \
    ibv_get_async_event ibv_ack_async_event ibv_query_device ibv_query_port ibv_query_gid ibv_alloc_pd ibv_dealloc_pd \
    ibv_reg_mr ibv_dereg_mr ibv_create_comp_channel ibv_destroy_comp_channel ibv_create_cq ibv_resize_cq ibv_destroy_cq \
    ibv_get_cq_event ibv_ack_cq_events ibv_create_srq ibv_destroy_srq ibv_create_qp ibv_modify_qp ibv_destroy_qp ibv_event_type_str";
/// The first came with rdma-core 32, the second with 34.
const VERBS_OPTIONAL: &str = "_ibv_query_gid_ex ibv_reg_dmabuf_mr";

const CM: &str = "rdma_create_event_channel rdma_destroy_event_channel rdma_create_id rdma_destroy_id rdma_bind_addr \
    rdma_resolve_addr rdma_resolve_route rdma_connect rdma_listen rdma_accept rdma_reject rdma_disconnect \
    rdma_get_cm_event rdma_ack_cm_event rdma_init_qp_attr rdma_get_src_port rdma_event_str";
/// `rdma_establish` came with rdma-core 21.
const CM_OPTIONAL: &str = "rdma_establish";

/// Enums that no function's signature leads to.
const TYPES: &str = "ibv_access_flags ibv_send_flags ibv_wc_flags ibv_qp_attr_mask ibv_gid_type ibv_event_type ibv_wc_opcode \
    ibv_wr_opcode rdma_cm_event_type rdma_port_space ibv_port_state ibv_qp_state ibv_mtu ibv_gid_entry ibv_port_attr";

/// What libc has already, and what only pointers lead to.
const BLOCKED: &str = "pthread_.*|__pthread.*|__atomic_wide_counter.*|ibv_wq|ibv_wq_.*";

const NOTICE: &str = "\
// Written by `cargo xtask bindings` with bindgen from <infiniband/verbs.h> and <rdma/rdma_cma.h>; do not edit.
//
// Copyright (c) 2004, 2005 Topspin Communications.  All rights reserved.
// Copyright (c) 2004, 2011-2012 Intel Corporation.  All rights reserved.
// Copyright (c) 2005, 2006, 2007 Cisco Systems, Inc.  All rights reserved.
// Copyright (c) 2005 PathScale, Inc.  All rights reserved.
// Copyright (c) 2005 Voltaire Inc.  All rights reserved.
// Copyright (c) 2020 Intel Corporation.  All rights reserved.
//
// Of the two licences that the headers offer, this is the OpenIB.org BSD one:
//
//     Redistribution and use in source and binary forms, with or
//     without modification, are permitted provided that the following
//     conditions are met:
//
//      - Redistributions of source code must retain the above
//        copyright notice, this list of conditions and the following
//        disclaimer.
//
//      - Redistributions in binary form must reproduce the above
//        copyright notice, this list of conditions and the following
//        disclaimer in the documentation and/or other materials
//        provided with the distribution.
//
// THE SOFTWARE IS PROVIDED \"AS IS\", WITHOUT WARRANTY OF ANY KIND,
// EXPRESS OR IMPLIED, INCLUDING BUT NOT LIMITED TO THE WARRANTIES OF
// MERCHANTABILITY, FITNESS FOR A PARTICULAR PURPOSE AND
// NONINFRINGEMENT. IN NO EVENT SHALL THE AUTHORS OR COPYRIGHT HOLDERS
// BE LIABLE FOR ANY CLAIM, DAMAGES OR OTHER LIABILITY, WHETHER IN AN
// ACTION OF CONTRACT, TORT OR OTHERWISE, ARISING FROM, OUT OF OR IN
// CONNECTION WITH THE SOFTWARE OR THE USE OR OTHER DEALINGS IN THE
// SOFTWARE.
";

#[derive(clap::Args)]
pub struct Args {
    /// The bindgen program; without it, one is built with `cargo install` below the target directory.
    #[arg(long, value_name = "PATH")]
    bindgen: Option<String>,
}

pub fn run(workspace: &Workspace, args: &Args) -> Result<ExitCode> {
    let bindgen = match &args.bindgen {
        Some(path) => path.clone(),
        None => install(workspace)?,
    };
    let dir = workspace.target.join("bindings");
    fs::create_dir_all(&dir)?;
    let header = dir.join("headers.h");
    fs::write(&header, "#include <infiniband/verbs.h>\n#include <rdma/rdma_cma.h>\n")?;
    // One item, one line: what follows reads lines.
    let format = dir.join("rustfmt.toml");
    fs::write(&format, "max_width = 100000\nuse_small_heuristics = \"Max\"\n")?;
    let generate = |arch: &str, include: &str| -> Result<Generated> {
        let functions = [VERBS, VERBS_OPTIONAL, CM, CM_OPTIONAL].map(any_of).join("|");
        let text = Command::new(&bindgen)
            .arg(&header)
            .args("--rust-target 1.85 --rust-edition 2024 --default-enum-style consts --no-prepend-enum-name")
            .args("--no-doc-comments --no-derive-debug --ctypes-prefix libc --merge-extern-blocks --sort-semantically")
            .args("--rustfmt-configuration-file")
            .arg(&format)
            .args("--allowlist-function")
            .arg(functions)
            .args("--allowlist-type")
            .arg(any_of(TYPES))
            .args("--blocklist-type")
            .arg(BLOCKED)
            .args(&format!("-- --target={arch}-linux-gnu {include}"))
            .stdout()?;
        Generated::parse(&text)
    };
    let x86_64 = generate("x86_64", "")?;
    let aarch64 = generate("aarch64", "-isystem /usr/aarch64-linux-gnu/include")?;
    ensure!(x86_64.types == aarch64.types, "the types differ between the architectures, not only their layout");
    write("types.rs", &types(&x86_64)?)?;
    write("constants.rs", &constants(&x86_64)?)?;
    write("layout.rs", &layout(&x86_64, &aarch64)?)?;
    write("functions.rs", &functions(&x86_64)?)?;
    for file in ["types.rs", "constants.rs", "functions.rs", "layout.rs"] {
        Command::new("rustfmt --edition 2024 --config max_width=120,use_small_heuristics=Max")
            .arg(format!("{OUT}/{file}"))
            .run()?;
    }
    Ok(ExitCode::SUCCESS)
}

fn install(workspace: &Workspace) -> Result<String> {
    let root = workspace.target.join("tools");
    let program = root.join("bin/bindgen");
    if !program.exists() {
        Command::new("cargo install --locked bindgen-cli")
            .args(&format!("--version {BINDGEN}"))
            .args("--root")
            .arg(&root)
            .run()?;
    }
    Ok(program.into_string())
}

fn any_of(names: &str) -> String {
    names.split_whitespace().collect::<Vec<_>>().join("|")
}

fn write(file: &str, text: &str) -> Result<()> {
    let path = format!("{OUT}/{file}");
    fs::write(&path, text).with_context(|| format!("write {path}"))
}

/// Starts of lines that hold nothing, once the assertions and the functions are taken out.
const IGNORED: [&str; 5] = ["const _: () = {", "};", "unsafe extern \"C\" {", "#[allow(clippy", "/*"];

/// bindgen's output, taken apart.
#[derive(Default)]
struct Generated {
    /// Everything but the layout assertions and the functions.
    types: Vec<String>,
    layouts: Vec<Layout>,
    /// Name, and the signature from the parenthesis on.
    functions: HashMap<String, String>,
}

/// Size, alignment and offsets of one type; unions too, whose offsets are all 0.
#[derive(Default)]
struct Layout {
    name: String,
    size: usize,
    align: usize,
    fields: Vec<(String, usize)>,
}

impl Generated {
    fn parse(text: &str) -> Result<Self> {
        let mut this = Self::default();
        for line in text.lines() {
            let trimmed = line.trim();
            if let Some(function) = trimmed.strip_prefix("pub fn ") {
                let at = function.find('(').context("a function without parameters")?;
                this.functions.insert(function[..at].to_owned(), function[at..].trim_end_matches(';').to_owned());
            } else if trimmed.starts_with("[\"") {
                this.assertion(trimmed)?;
            } else if !IGNORED.iter().any(|start| trimmed.starts_with(start)) && !trimmed.is_empty() {
                this.types.push(line.to_owned());
            }
        }
        // The end of the extern block, which was last.
        if this.types.last().is_some_and(|line| line == "}") {
            this.types.pop();
        }
        Ok(this)
    }

    /// `["Size of T"][expression - 8usize];` and the like.
    fn assertion(&mut self, line: &str) -> Result<()> {
        let what = line.split('"').nth(1).context("an assertion without a text")?;
        let number = line.rsplit(" - ").next().and_then(|rest| rest.strip_suffix("usize];"));
        let value = number.with_context(|| line.to_owned())?.parse()?;
        if let Some(name) = what.strip_prefix("Size of ") {
            self.layouts.push(Layout { name: name.to_owned(), size: value, ..Layout::default() });
            return Ok(());
        }
        let last = self.layouts.last_mut().context("an assertion before any size")?;
        if what.starts_with("Alignment of ") {
            last.align = value;
        } else if let Some((_, field)) = what.split_once("::") {
            last.fields.push((field.to_owned(), value));
        } else {
            bail!("an assertion of a new kind: {line}");
        }
        Ok(())
    }
}

fn types(generated: &Generated) -> Result<String> {
    let mut text = String::from(NOTICE);
    text.push_str("\nuse libc::{pthread_cond_t, pthread_mutex_t};\n\n");
    text.push_str("#[repr(C)]\npub struct ibv_wq {\n    _unused: [u8; 0],\n}\n");
    for line in generated.types.iter().filter(|line| !is_constant(line)) {
        writeln!(text, "{line}")?;
    }
    Ok(text)
}

fn constants(generated: &Generated) -> Result<String> {
    let mut text = String::from(NOTICE);
    text.push_str("\nuse super::types::*;\n\n");
    for line in generated.types.iter().filter(|line| is_constant(line)) {
        writeln!(text, "{line}")?;
    }
    Ok(text)
}

fn is_constant(line: &str) -> bool {
    line.starts_with("pub const ")
}

fn layout(x86_64: &Generated, aarch64: &Generated) -> Result<String> {
    let mut text = String::from(NOTICE);
    text.push_str("\nuse super::assert_layout::{layouts, pick};\nuse super::types::*;\n\n");
    text.push_str("// Size, alignment and offsets; `A | B` where x86_64 has A and aarch64 has B.\nlayouts! {\n");
    ensure!(x86_64.layouts.len() == aarch64.layouts.len(), "the types differ between the architectures");
    let both = |x: usize, a: usize| if x == a { x.to_string() } else { format!("{x} | {a}") };
    for (x, a) in x86_64.layouts.iter().zip(&aarch64.layouts) {
        write!(text, "    {}: {}, {} {{", x.name, both(x.size, a.size), both(x.align, a.align))?;
        for ((field, offset), (_, other)) in x.fields.iter().zip(&a.fields) {
            write!(text, " {field}: {},", both(*offset, *other))?;
        }
        text.push_str(" }\n");
    }
    text.push_str("}\n");
    wrap(&text)
}

/// rustfmt leaves the inside of macros alone, so long lines are broken here.
fn wrap(text: &str) -> Result<String> {
    const WIDTH: usize = 116;
    let mut out = String::new();
    for line in text.lines() {
        let mut rest = line.to_owned();
        while rest.len() > WIDTH {
            let at = rest[..WIDTH].rfind(", ").context("a line that cannot be broken")?;
            writeln!(out, "{}", &rest[..=at])?;
            rest = format!("        {}", rest[at + 1..].trim_start());
        }
        writeln!(out, "{rest}")?;
    }
    Ok(out)
}

fn functions(generated: &Generated) -> Result<String> {
    let mut text = String::from(NOTICE);
    text.push_str("\nuse super::load::library;\nuse super::types::*;\n");
    for (doc, name, file, required, optional) in [
        ("libibverbs: devices, memory, queues.", "Verbs", "libibverbs.so.1", VERBS, VERBS_OPTIONAL),
        ("librdmacm: addresses and connections.", "Cm", "librdmacm.so.1", CM, CM_OPTIONAL),
    ] {
        writeln!(text, "\nlibrary! {{\n    /// {doc}\n    {name} = \"{file}\";\n    required:")?;
        for function in required.split_whitespace() {
            writeln!(text, "    fn {function}{};", signature(generated, function)?)?;
        }
        text.push_str("    optional:\n");
        for function in optional.split_whitespace() {
            writeln!(text, "    fn {function}{};", signature(generated, function)?)?;
        }
        text.push_str("}\n");
    }
    wrap(&text)
}

fn signature<'a>(generated: &'a Generated, function: &str) -> Result<&'a str> {
    generated.functions.get(function).map(String::as_str).with_context(|| format!("the headers have no {function}"))
}
