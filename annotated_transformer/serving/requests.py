"""What a request may hold: its limits, and the errors that name the field at fault."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from annotated_transformer.data.files import parse_object


@dataclass(frozen=True)
class Limits:
    """Limits on requests."""

    body: int = 2**18  #: Bytes of a request's body.
    sentences: int = 64  #: Sentences of a request.
    characters: int = 2000  #: Characters of a sentence.
    shown: int = 64  #: Tokens of a sentence, and of its translation, whose attention is returned.
    beam: int = 8  #: The largest beam.
    queue: int = 1024  #: Sentences that wait for the model.
    seconds: float = 30.0  #: Time to find an answer, once the head of a request is there.
    #: Source tokens of a batch, over all hypotheses; one sentence may have more.
    tokens: int = 4096
    wait: float = 0.003  #: Seconds that a sentence waits for others to be translated with.


class Refusal(Exception):  # noqa: N818  # it is an answer, not a fault of ours
    """A request is not answered: a message of one line, and the response's status and headers."""

    def __init__(self, status: int, message: str, **headers: str) -> None:
        super().__init__(message)
        self.status, self.headers = status, headers


def read_request(
    body: bytes, limits: Limits, most_beam: int, *, single: bool = False
) -> tuple[list[str], int, float]:
    """Parse and check the body of a request; return its sentences, beam and alpha.

    Args:
        body: JSON: ``{"sentences": [...]}`` or, if single, ``{"sentence": "..."}``; ``beam`` and
            ``alpha`` are optional.
        limits: The limits.
        most_beam: Largest beam that the system can use, the size of its vocabulary.
        single: Whether one sentence is expected.

    Raises:
        Refusal: A field is missing, unknown, of a wrong type or out of range.
    """
    field = "sentence" if single else "sentences"
    data = read_object(body)
    for name in data:
        if name not in (field, "beam", "alpha"):
            raise field_refusal(ascii(name)[:40], f"is unknown; use {field}, beam and alpha")
    if field not in data:
        raise field_refusal(field, "is missing")
    found = [data[field]] if single else data[field]
    if not isinstance(found, list):
        raise field_refusal(field, "must be a list of strings")
    most = min(limits.sentences, limits.queue)
    if not 1 <= len(found) <= most:
        raise field_refusal(field, f"must hold 1 to {most} sentences, not {len(found)}")
    for i, sentence in enumerate(found):
        check_sentence(field if single else f"{field}[{i}]", sentence, limits)
    beam, alpha = data.get("beam", 1), data.get("alpha", 0.6)
    most = min(limits.beam, most_beam)
    if isinstance(beam, bool) or not isinstance(beam, int) or not 1 <= beam <= most:
        raise field_refusal("beam", f"must be an integer from 1 to {most}")
    number = isinstance(alpha, int | float) and not isinstance(alpha, bool)
    if not number or not 0 <= alpha <= 10:
        raise field_refusal("alpha", "must be a number from 0 to 10")
    if beam == 1 and "alpha" in data:
        raise field_refusal("alpha", "has no effect with beam 1; leave it out, or give a beam")
    return found, beam, float(alpha)


def read_object(body: bytes) -> dict[str, Any]:
    """Parse a JSON object whose names are unique and whose numbers are finite.

    Raises:
        Refusal: The body is no such object.
    """
    try:
        return parse_object(
            body.decode(), object_pairs_hook=unique_fields, parse_constant=no_number
        )
    except UnicodeDecodeError:
        raise field_refusal("body", "is not valid UTF-8") from None
    except ValueError as error:
        raise field_refusal("body", f"is {str(error).split(':')[0]}") from None


def unique_fields(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Return the fields of an object; raise Refusal for one that is given twice."""
    found = dict(pairs)
    if len(found) < len(pairs):
        ((twice, _),) = Counter(name for name, _ in pairs).most_common(1)
        raise field_refusal(ascii(twice)[:40], "is given twice")
    return found


def no_number(text: str) -> float:
    """Refuse NaN and infinities, which JSON does not have."""
    raise field_refusal("body", f"holds {text}, which is not JSON")


def check_sentence(name: str, sentence: object, limits: Limits) -> None:
    """Raise Refusal if a sentence cannot be a line of text."""
    if not isinstance(sentence, str):
        raise field_refusal(name, "must be a string")
    if len(sentence) > limits.characters:
        much = f"{len(sentence)} characters, more than {limits.characters}"
        raise field_refusal(name, f"has {much}; split it into sentences")
    if any("\ud800" <= sign <= "\udfff" for sign in sentence):
        raise field_refusal(name, "is not valid Unicode")
    if "\n" in sentence:
        raise field_refusal(name, "holds a line break; give each line by itself")


def check_tokens(name: str, count: int, most: int) -> None:
    """Raise Refusal if a sentence has more tokens than fit."""
    if count > most:
        raise field_refusal(name, f"has {count} tokens, more than {most}; split it into sentences")


def field_refusal(field: str, reason: str) -> Refusal:
    """Return the refusal of a field."""
    return Refusal(422, f"{field}: {reason}")


def shutdown_refusal() -> Refusal:
    """Return the refusal of a request that the server, told to stop, had no time for."""
    return Refusal(503, "the server is stopping; try again later", retry_after="5")
