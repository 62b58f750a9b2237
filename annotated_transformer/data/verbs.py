"""German verbs in two parts, whose prefix ends the sentence."""

from collections.abc import Mapping, Sequence

SEPARABLE: Mapping[str, frozenset[str]] = {  # prefix: forms of verbs that it may belong to
    prefix: frozenset(verbs.split())
    for prefix, verbs in {
        "ab": "hebt heben springt springen schüttelt schneidet wäscht wischt rasiert trocknet",
        "an": "schaut schauen sieht sehen guckt gucken blickt blicken starrt starren zieht ziehen "
        "bietet bieten hält halten feuert feuern lehnt",
        "auf": "tritt treten führt führen hebt heben stellt stellen baut bauen passt räumt hängt "
        "bläst sammelt wirbelt",
        "aus": "ruht ruhen sieht sehen führt führen holt streckt strecken packt breitet steigt",
        "ein": "kauft kaufen schläft schenkt schenken fängt taucht stellt nimmt nehmen",
        "entlang": "geht gehen fährt fahren läuft laufen rennt rennen joggt reitet schiebt",
        "fest": "hält halten",
        "herum": "steht stehen sitzt sitzen geht gehen läuft laufen wirbelt springt springen liegt",
        "herunter": "rutscht rutschen fährt fahren geht gehen springt läuft kommt",
        "hinunter": "rutscht fährt fahren geht gehen läuft laufen springt gleitet",
        "hoch": "hält halten klettert klettern springt springen hebt heben geht gehen",
        "teil": "nimmt nehmen",
        "vor": "bereitet bereiten führt führen liest lesen beugt",
        "vorbei": "geht gehen fährt fahren läuft laufen rennt rennen reitet kommt",
        "weg": "schaut schauen läuft geht fährt räumt",
        "zu": "schaut schauen sieht sehen hört hören guckt bereitet bereiten winkt geht rennt",
        "zurück": "lehnt blickt wirft schlägt kommt",
    }.items()
}


def verb_of_prefix(words: Sequence[str], least: int = 4) -> tuple[int, int] | None:
    """Find a German verb in two parts, whose prefix ends the sentence.

    Args:
        words: A sentence, cut into words and marks.
        least: Fewest words from the verb to its prefix.

    Returns:
        The places of prefix and verb; ``None`` unless exactly one verb can be meant.
    """
    if len(words) < 3 or words[-1] != "." or words[-2] not in SEPARABLE:
        return None
    prefix = len(words) - 2
    verbs = [n for n, word in enumerate(words[:prefix]) if word in SEPARABLE[words[prefix]]]
    return (prefix, verbs[0]) if len(verbs) == 1 and prefix - verbs[0] >= least else None
