//! The override file.

use tokio_rdma::topology::{Answer, Level, OVERRIDE_VARIABLE, Topology};

use crate::machine::{Machine, address, path};

fn corrected(machine: &Machine, text: &str) -> tokio_rdma::Result<Topology> {
    machine.tree.file("override", text).unwrap();
    machine.topology().with_overrides(machine.root().join("override"))
}

#[test]
fn a_pair_is_corrected_in_both_directions_and_says_so() {
    let machine = Machine::server();
    machine.tree.file("class/infiniband/rxe0/parent", "veth0").unwrap();
    machine.tree.port("rxe0", 1, "4: ACTIVE", None).unwrap();
    let topology = corrected(&machine, "# hidden\n00000000:03:00.0 mlx5_2 PIX\n\nrxe0 0000:03:00.0 node\n").unwrap();
    let hidden = path(&topology, "0000:03:00.0", "0000:08:00.0");
    assert_eq!((hidden.level, hidden.overridden), (Level::Pix, Some(2)));
    assert!(hidden.why.contains("line 2") && hidden.why.contains("override"), "{}", hidden.why);
    // The bridges are as sysfs shows them, which is not the way.
    assert_eq!(hidden.bridges.len(), 4);
    assert!(matches!(hidden.acs_redirect(), Answer::Unknown(_)));
    let other = path(&topology, "0000:03:00.0", "0000:04:00.0");
    assert_eq!((other.level, other.overridden), (Level::Pix, None));
    // One without a function goes by its name.
    let carried = topology.path_to_nic(address("0000:03:00.0"), topology.nic("rxe0").unwrap());
    assert_eq!((carried.level, carried.overridden), (Level::Node, Some(4)));
    let ranked: Vec<_> = topology.nics_for(address("0000:03:00.0")).usable.into_iter().map(|nic| nic.name).collect();
    assert_eq!(ranked[..3], ["mlx5_0", "mlx5_2", "mlx5_1"]);
}

#[test]
fn faults_are_told_with_their_line() {
    let machine = Machine::server();
    for (text, parts) in [
        ("\n0000:03:00.0 mlx5_2\n", &["line 2", "2 words", "0000:19:00.0 mlx5_0 PIX"][..]),
        ("0000:03:00.0 mlx5_2 near\n", &["line 1", "near", "PHB"]),
        ("mlx5_0 0000:04:00.0 PIX\n", &["line 1", "one device"]),
        ("0000:03:00.0 mlx5_2 PIX\n0000:08:00.0 0000:03:00.0 PXB\n", &["line 2", "line 1", "PXB", "PIX"]),
    ] {
        let error = corrected(&machine, text).unwrap_err();
        assert!(error.is_caller_error());
        let error = error.to_string();
        parts.iter().for_each(|part| assert!(error.contains(part), "{part:?} is not in {error:?}"));
    }
    let error = machine.topology().with_overrides(machine.root().join("none")).unwrap_err().to_string();
    assert!(error.contains("none") && error.contains("No such file"), "{error}");
}

#[test]
fn lines_about_other_machines_are_told_and_change_nothing() {
    let machine = Machine::server();
    let topology = corrected(&machine, "0000:03:00.0 mlx5_77 PIX\n0000:ee:00.0 mlx5_0 SYS\n").unwrap();
    let [first, second] = topology.unused_overrides() else { panic!("{:?}", topology.unused_overrides()) };
    assert!(first.contains("line 1") && first.contains("mlx5_77"), "{first}");
    assert!(second.contains("line 2") && second.contains("0000:ee:00.0"), "{second}");
}

#[test]
fn the_environment_names_the_file() {
    // A process of its own has the variable: to set it in this one is unsafe.
    if std::env::var_os(OVERRIDE_VARIABLE).is_some() {
        let error = Topology::read().unwrap_err().to_string();
        assert!(error.contains("line 1") && error.contains("nonsense"), "{error}");
        return;
    }
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), "a b nonsense\n").unwrap();
    let mut child = std::process::Command::new(std::env::current_exe().unwrap());
    child.args(["overrides::the_environment_names_the_file", "--exact"]).env(OVERRIDE_VARIABLE, file.path());
    let output = child.output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && text.contains("1 passed"), "{text}");
}
