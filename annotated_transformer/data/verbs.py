"""German separable verbs, whose prefix ends the sentence."""

from collections.abc import Mapping, Sequence

from annotated_transformer.data.grammar.lexicon import read_table

SEPARABLE: Mapping[str, frozenset[str]] = {  # prefix: verb forms that it may belong to
    row["prefix"]: frozenset(row["verbs"].split()) for row in read_table("separable")
}


def verb_of_prefix(words: Sequence[str], least: int = 4) -> tuple[int, int] | None:
    """Find a German separable verb whose prefix ends the sentence.

    Args:
        words: A sentence, split into words and punctuation marks.
        least: Minimum distance from the verb to its prefix, in words.

    Returns:
        The positions of prefix and verb; ``None`` unless exactly one verb matches.
    """
    if len(words) < 3 or words[-1] != "." or words[-2] not in SEPARABLE:
        return None
    prefix = len(words) - 2
    verbs = [n for n, word in enumerate(words[:prefix]) if word in SEPARABLE[words[prefix]]]
    return (prefix, verbs[0]) if len(verbs) == 1 and prefix - verbs[0] >= least else None
