//! What a training goes on from, in a file: written whole or not at all, and trusted only if its sum is right.
//!
//! | bytes | what |
//! |---|---|
//! | 0..8 | the ASCII letters `PSCHECK1` |
//! | 8..40 | SHA-256 of all that follows |
//! | 40.. | the [`Checkpoint`], as postcard serializes it |

use std::fs::{self, File};
use std::io::{Read, Write};
use std::path::Path;

use anyhow::{Context, Result, ensure};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::schedule::Position;
use crate::model::PARAMETERS;

const MAGIC: &[u8; 8] = b"PSCHECK1";
const SUM: usize = 32;

/// No checkpoint of this program comes near: the parameters take 19 KB, and a step 4 B.
const MAX_LEN: u64 = 64 << 20;

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Checkpoint {
    /// Of the order of the samples, and their number in a ticket: a training that goes on with others would not see each sample once.
    pub seed: u64,
    pub batch: u32,
    pub version: u64,
    /// See [`Position`].
    pub next: u64,
    pub due: Vec<u64>,
    pub parameters: Vec<f32>,
    /// Of the newest steps.
    pub losses: Vec<f32>,
}

impl Checkpoint {
    pub fn position(&self) -> Position {
        Position { version: self.version, next: self.next, due: self.due.clone() }
    }

    /// Replaces the file, if there is one, at one instant: whoever opens it finds the old one whole, or the new one.
    pub fn save(&self, path: &Path) -> Result<()> {
        let save = || -> Result<()> {
            let body = postcard::to_stdvec(self)?;
            let folder = match path.parent() {
                Some(folder) if !folder.as_os_str().is_empty() => folder,
                _ => Path::new("."),
            };
            // In the same folder, since renaming works within a file system only; always the same, so that none is left over but one.
            let mut new = path.as_os_str().to_owned();
            new.push(".new");
            let mut file = File::create(&new)?;
            file.write_all(MAGIC)?;
            file.write_all(&Sha256::digest(&body))?;
            file.write_all(&body)?;
            // On disk before its name is: after a power cut the name would lead to nothing otherwise.
            file.sync_all()?;
            fs::rename(&new, path)?;
            File::open(folder)?.sync_all()?;
            Ok(())
        };
        save().with_context(|| format!("write the checkpoint {}", path.display()))
    }

    pub fn load(path: &Path) -> Result<Self> {
        let load = || -> Result<Self> {
            let len = fs::metadata(path)?.len();
            ensure!(len <= MAX_LEN, "it has {len} bytes, the limit is {MAX_LEN}; is it another file?");
            let mut bytes = Vec::with_capacity(len as usize);
            File::open(path)?.take(MAX_LEN).read_to_end(&mut bytes)?;
            Self::from_bytes(&bytes)
        };
        load().with_context(|| format!("read the checkpoint {}", path.display()))
    }

    fn from_bytes(bytes: &[u8]) -> Result<Self> {
        let rest = bytes.strip_prefix(MAGIC).context("it does not begin as a checkpoint; is it another file?")?;
        let (sum, body) = rest.split_first_chunk::<SUM>().context("it is too short, so it is damaged")?;
        ensure!(Sha256::digest(body)[..] == sum[..], "its SHA-256 is wrong, so it is damaged; take an older one");
        let it: Self = postcard::from_bytes(body)?;
        ensure!(
            it.parameters.len() == PARAMETERS,
            "it has {} parameters, the model has {PARAMETERS}; it is of another version of the program",
            it.parameters.len()
        );
        ensure!(
            it.due.is_sorted_by(|a, b| a < b) && it.due.iter().all(|ticket| *ticket < it.next) && it.batch > 0,
            "its tickets contradict each other"
        );
        Ok(it)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model;

    fn checkpoint() -> Checkpoint {
        let parameters = model::initial(1).to_vec();
        Checkpoint { seed: 1, batch: 32, version: 9, next: 40, due: vec![3, 39], parameters, losses: vec![0.5; 9] }
    }

    #[test]
    fn it_comes_back_and_replaces_the_one_before() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("checkpoint");
        let mut it = checkpoint();
        it.save(&path).unwrap();
        assert_eq!(Checkpoint::load(&path).unwrap(), it);
        it.version += 1;
        it.save(&path).unwrap();
        assert_eq!(Checkpoint::load(&path).unwrap(), it);
        assert_eq!(fs::read_dir(&folder).unwrap().count(), 1, "nothing else is left");
    }

    #[test]
    fn any_damage_is_found() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("checkpoint");
        checkpoint().save(&path).unwrap();
        let whole = fs::read(&path).unwrap();
        for at in (0..whole.len()).step_by(97).chain(0..48) {
            let mut bytes = whole.clone();
            bytes[at] ^= 0x10;
            assert!(Checkpoint::from_bytes(&bytes).is_err(), "byte {at}");
        }
        for len in (0..whole.len()).step_by(97).chain(0..48) {
            assert!(Checkpoint::from_bytes(&whole[..len]).is_err(), "{len} bytes");
        }
        assert!(Checkpoint::from_bytes(&[&whole[..], &[0]].concat()).is_err(), "a byte more");
    }

    #[test]
    fn errors_name_the_file_and_the_fault() {
        let folder = tempfile::tempdir().unwrap();
        let missing = folder.path().join("missing").join("file");
        let error = format!("{:#}", checkpoint().save(&missing).unwrap_err());
        assert!(error.contains("missing/file"), "{error}");
        let path = folder.path().join("other");
        fs::write(&path, "something else").unwrap();
        let error = format!("{:#}", Checkpoint::load(&path).unwrap_err());
        assert!(error.contains("other") && error.contains("another file"), "{error}");
    }

    #[test]
    fn contradictions_are_refused_though_the_sum_is_right() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("checkpoint");
        for change in [
            |it: &mut Checkpoint| it.parameters.truncate(5),
            |it: &mut Checkpoint| it.due.push(40),
            |it: &mut Checkpoint| it.due = vec![3, 3],
            |it: &mut Checkpoint| it.batch = 0,
        ] {
            let mut it = checkpoint();
            change(&mut it);
            it.save(&path).unwrap();
            assert!(Checkpoint::load(&path).is_err());
        }
    }
}
