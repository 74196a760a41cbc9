//! Answers that may not be there.

use std::fmt;

/// Yes, no, or why it cannot be told.
///
/// "Unknown" is an answer of its own: a check that needs root has not passed where nobody could look.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Answer {
    /// It is so.
    Yes,
    /// It is not so.
    No,
    /// It cannot be told, for this reason.
    Unknown(String),
}

impl Answer {
    /// Yes if one of them is yes, else unknown if one of them is, else no.
    pub fn any<'a>(answers: impl IntoIterator<Item = &'a Self>) -> Self {
        let mut unknown = Self::No;
        for answer in answers {
            match answer {
                Self::Yes => return Self::Yes,
                Self::No => {}
                Self::Unknown(_) if unknown != Self::No => {}
                Self::Unknown(_) => unknown = answer.clone(),
            }
        }
        unknown
    }
}

impl From<bool> for Answer {
    fn from(yes: bool) -> Self {
        if yes { Self::Yes } else { Self::No }
    }
}

impl fmt::Display for Answer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Yes => f.write_str("yes"),
            Self::No => f.write_str("no"),
            Self::Unknown(why) => write!(f, "cannot tell ({why})"),
        }
    }
}
