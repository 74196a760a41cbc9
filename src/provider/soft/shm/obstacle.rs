//! Why there is no link through shared memory. REQUEST, REPLY and READY carry it by number, so that both ends name the same reason.

/// Each has its number on the wire; those below 3 mean that nothing stands in the way, or that the peer does not say what does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in super::super) enum Obstacle {
    Unwanted = 3,
    OtherUser = 4,
    OtherHost = 5,
    Failed = 6,
    UnknownUser = 7,
    Untold = 0,
}

impl Obstacle {
    const ALL: [Self; 5] = [Self::Unwanted, Self::OtherUser, Self::OtherHost, Self::Failed, Self::UnknownUser];

    pub(in super::super) fn code(self) -> u8 {
        self as u8
    }

    /// What a peer's number means.
    pub(in super::super) fn of(code: u8) -> Self {
        Self::ALL.into_iter().find(|obstacle| obstacle.code() == code).unwrap_or(Self::Untold)
    }

    /// In words: for the end that found it, and for the other one.
    pub(in super::super) fn words(self) -> [&'static str; 2] {
        match self {
            Self::Unwanted => ["this end wants sockets only", "the other end wants sockets only"],
            Self::OtherUser => ["the ends belong to different users"; 2],
            Self::OtherHost => ["the ends are not on one host, or not in one network namespace"; 2],
            Self::Failed => {
                ["this end could not make or map shared memory", "the other end could not make or map shared memory"]
            }
            Self::UnknownUser => ["the user id 65534 stands for any user that the namespace does not know"; 2],
            Self::Untold => ["this end did not say why", "the other end did not say why"],
        }
    }

    /// The same where it was the other end that found it.
    pub(in super::super) fn words_of_peer(self) -> [&'static str; 2] {
        let [finder, other] = self.words();
        [other, finder]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_obstacle_has_a_number_and_words_of_its_own() {
        for (at, one) in Obstacle::ALL.into_iter().enumerate() {
            assert!(Obstacle::of(one.code()) == one && one.code() >= 3);
            assert!(
                Obstacle::ALL[..at].iter().all(|other| one.words().iter().all(|words| !other.words().contains(words)))
            );
        }
        assert!([0, 1, 2, 8, 255].map(Obstacle::of).iter().all(|obstacle| *obstacle == Obstacle::Untold));
    }
}
