"""Sentences that two splits share."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from annotated_transformer.data.cleaning import corpus_warnings, note_overlap
from annotated_transformer.data.corpora import load_corpus

VALID = load_corpus("grammar", split="val", size=12)

lines_of_few = st.sampled_from(["a", "a ", "b", "c", "d", "", " "])
small_text = st.lists(st.tuples(lines_of_few, lines_of_few), max_size=5)


@given(st.fixed_dictionaries({"train": small_text, "val": small_text, "test": small_text}))
def test_every_two_splits_are_compared_in_both_languages(
    splits: dict[str, list[tuple[str, str]]],
) -> None:
    def lines(split: str, side: int) -> list[str]:
        return [pair[side].strip() for pair in splits[split]]

    expected = []
    for split, other in (("val", "train"), ("test", "train"), ("test", "val")):
        parts = []
        for side, name in enumerate(("source", "target")):
            own = lines(split, side)
            if shared := {line for line in own if line} & set(lines(other, side)):
                place = "the training text" if other == "train" else other
                parts.append(
                    f"{len(shared)} distinct {name} sentences of {split} also occur in {place}, "
                    f"the first on line {min(map(own.index, shared)) + 1} of {split}"
                )
        if parts:
            expected.append(("train" if other == "train" else split, "; ".join(parts)))
    held = {
        split: replace(
            VALID,
            source=tuple(a for a, _ in splits[split]),
            target=tuple(b for _, b in splits[split]),
        )
        for split in ("val", "test")
    }
    notes: dict[str, list[str]] = {"train": [], "test": []}
    watched = note_overlap(splits["train"], "the training text", held, notes["train"])
    assert list(watched) == splits["train"]
    for _ in note_overlap(held["val"], "val", {"test": held["test"]}, notes["test"]):
        pass
    assert [(split, note) for split, found in notes.items() for note in found] == expected


def test_warnings_about_texts_in_memory() -> None:
    train = load_corpus("grammar", size=1000)
    assert list(corpus_warnings(train, {"val": VALID})) == []
    drifted = replace(
        train,
        source=train.source[:-1],
        target=train.target[:500] + train.target[501:],
        checksums=(("a.de", ""), ("a.en", "")),
        blank=(3, 4, 990),
    )
    drift, both = corpus_warnings(drifted, {"val": VALID, "test": train.head(1)})
    assert drift.startswith("a.de, line 50")
    assert int(drift.split("line ")[1].split(":")[0]) in range(496, 514)
    assert "by line n-1 of a.en" in drift
    assert both.startswith("1 distinct source sentences of test also occur in the training text")
    assert next(corpus_warnings(train, {"val": drifted})) == drift
