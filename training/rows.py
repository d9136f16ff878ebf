"""Rows of tokens for the default model: books, pass keys in book text, and step-by-step arithmetic.

This file knows texts and tokens; it does not know models, losses or schedules. A batch depends only
on (SEED, step), so a resumed training sees exactly the rows that an uninterrupted one sees.
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from disagg.errors import ConfigError

Tokens = NDArray[np.uint16]
SEED = 20240917
# whole books; none of them is part of a collection in the training set
HELD_OUT = (
    "The Wendigo",
    "The Warden",
    "The Sign of the Four",
    "Cranford",
    "The Time Machine",
    "The Scarlet Plague",
    "Persuasion",
    "Typhoon",
    "Prester John",
    "The Innocence of Father Brown",
    "My Ántonia",
    "Kidnapped",
)
PLACES = (  # noqa: SIM905 - a list of fifty quoted words reads worse
    "harbor garden library station chapel mill tower bridge cellar market castle temple school "
    "forest island cottage palace prison theatre museum stable orchard lighthouse cabin vault "
    "attic kitchen barn tunnel office factory hotel abbey bakery canal college cavern fort gate "
    "hall inn mine monastery park pier quarry shop tavern village wharf"
).split()
BOOK_SHARE = 0.65  # of the rows
PASSKEY_SHARE = 0.25  # of the rows; the rest is arithmetic
ANSWER_WEIGHT = (
    5.0  # answers are few among the tokens of a row, so their loss counts more
)
PIECE_CHARS = 20_000
PARAGRAPH = re.compile(r"(?<=\S)\n\n(?=\S)")


class Passage(NamedTuple):
    """A generated text. answers: whether a model has to predict each token from those before it."""

    tokens: list[int]
    answers: list[bool]


def split_books(text: str) -> dict[str, str]:
    """Title -> text, for a file whose books each begin with a line `# Title: ...`."""
    books = {}
    for part in re.split(r"(?m)^(?=# Title: )", text):
        book = part.strip()
        if book:
            first_line = book.split("\n", 1)[0]
            books[first_line.removeprefix("# Title: ").strip()] = book
    return books


def read_books(path: Path) -> tuple[dict[str, str], dict[str, str]]:
    """The books to train on, and the held-out ones; no title is in both."""
    books = split_books(path.read_text(encoding="utf8"))
    held_out = {title: books[title] for title in HELD_OUT if title in books}
    if not held_out:
        raise ConfigError(
            f"{path} holds none of the held-out books; expected any of {HELD_OUT}"
        )
    training = {title: x for title, x in books.items() if title not in held_out}
    return training, held_out


def encode_book(tokenizer: Any, text: str) -> Tokens:
    """The tokens of one book, an end-of-text token last."""
    pieces = []
    start = 0
    while start < len(text):
        # cut before a plain blank line: the tokens are then those of the uncut text
        cut = PARAGRAPH.search(text, start + PIECE_CHARS)
        end = cut.start() if cut else len(text)
        pieces.append(text[start:end])
        start = end
    encoded = tokenizer.backend_tokenizer.encode_batch_fast(
        pieces, add_special_tokens=False
    )
    ids = [token for piece in encoded for token in piece.ids]
    return np.array([*ids, tokenizer.eos_token_id], dtype=np.uint16)


def training_tokens(books: Path, tokenizer: Any, folder: Path) -> Tokens:
    """All training books as one memory-mapped array, written once into `folder`."""
    file = folder / "books.u16"
    index = folder / "books.json"
    stat = books.stat()
    key: dict[str, Any] = {
        "bytes": stat.st_size,
        "mtime": stat.st_mtime,
        "vocabulary": len(tokenizer),
        "held_out": list(HELD_OUT),
    }
    is_written = index.exists() and json.loads(index.read_text()) == key
    if not is_written:
        training_books, _ = read_books(books)
        with file.open("wb") as out:
            for text in training_books.values():
                encode_book(tokenizer, text).tofile(out)
        index.write_text(json.dumps(key))
    return np.memmap(file, dtype=np.uint16, mode="r")


def held_out_tokens(books: Path, tokenizer: Any) -> dict[str, Tokens]:
    """Title -> tokens of the held-out books."""
    _, held_out = read_books(books)
    return {title: encode_book(tokenizer, text) for title, text in held_out.items()}


def encode_parts(
    tokenizer: Any, parts: list[tuple[str, bool]], *, end: bool = False
) -> Passage:
    """A passage from (text, is answer) parts; `end` appends an end-of-text token as an answer."""
    text = ""
    spans = []
    for part, is_answer in parts:
        if is_answer:
            spans.append((len(text), len(text) + len(part)))
        text += part
    encoded = tokenizer.backend_tokenizer.encode(text, add_special_tokens=False)
    tokens = list(encoded.ids)
    answers = [
        any(first <= start < last for first, last in spans)
        for start, _ in encoded.offsets
    ]
    if end:
        tokens.append(tokenizer.eos_token_id)
        answers.append(True)
    return Passage(tokens, answers)


def spell(number: int) -> str:
    """A number as its digits with blanks between: 417 -> '4 1 7'."""
    return " ".join(str(number))


def passkey(tokenizer: Any, place: str, key: int) -> tuple[Passage, Passage]:
    """The passage that states a pass key, and the one that asks for it and answers."""
    digits = spell(key)
    statement = (
        f"\n\nThe pass key for the {place} is {digits}. "
        f"Remember it: the {place} is {digits}.\n\n"
    )
    question = (
        f"\n\nWhat is the pass key for the {place}? The pass key for the {place} is"
    )
    return (
        encode_parts(tokenizer, [(statement, False)]),
        encode_parts(tokenizer, [(question, False), (f" {digits}.", True)]),
    )


def arithmetic(
    tokenizer: Any, rng: np.random.Generator, steps: int, *, task_first: bool
) -> Passage:
    """A chain of small sums.

    task_first: the whole task, then the working as the answer; else each result is an answer
    """
    value = int(rng.integers(1, 20))
    task = f"Start with {spell(value)}."
    working = ""
    step_by_step = [(task, False)]
    for _ in range(steps):
        operand = int(rng.integers(1, 10))
        if value <= operand or (value + operand < 100 and rng.random() < 0.5):
            verb, sign, result = "Add", "+", value + operand
        else:
            verb, sign, result = "Take", "-", value - operand
        command = f" {verb} {operand}"
        equation = f" {spell(value)} {sign} {operand} ="
        step_by_step.append((f"{command}:{equation}", False))
        step_by_step.append((f" {spell(result)}.", True))
        task += f"{command}."
        working += f"{equation} {spell(result)}."
        value = result
    answer = f" {spell(value)}."
    if task_first:
        parts = [(f"{task}\nWorking:", False), (f"{working} Answer:{answer}", True)]
    else:
        parts = [*step_by_step, (" Answer:", False), (answer, True)]
    return encode_parts(tokenizer, parts, end=True)


def weave(filler: list[int], events: list[tuple[int, int, Passage]]) -> Passage:
    """The filler with each event's passage inserted before the filler token at its place."""
    tokens: list[int] = []
    answers: list[bool] = []
    done = 0
    for place, _, passage in events:
        tokens += filler[done:place]
        tokens += passage.tokens
        answers += [False] * (place - done)
        answers += passage.answers
        done = place
    tokens += filler[done:]
    answers += [False] * (len(filler) - done)
    return Passage(tokens, answers)


def passkey_prompt(
    tokenizer: Any,
    book: Tokens,
    rng: np.random.Generator,
    distance: int,
    lead: int = 16,
) -> Passage:
    """One pass key in a book's text, asked for `distance` book tokens after its statement."""
    place = str(rng.choice(PLACES))
    key = int(rng.integers(10_000, 100_000))
    statement, question = passkey(tokenizer, place, key)
    start = int(rng.integers(0, len(book) - lead - distance + 1))
    filler = book[start : start + lead + distance].tolist()
    return weave(filler, [(lead, 0, statement), (lead + distance, 0, question)])


@dataclass(frozen=True)
class RowMaker:
    """Batches of training rows. books: [tokens] u16; length: inputs per row, one target more."""

    books: Tokens
    tokenizer: Any
    length: int

    def batch(
        self, step: int, num_rows: int
    ) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """tokens: [rows, length + 1] i64; weights: [rows, length] f32 - of each target's loss."""
        rng = np.random.default_rng([SEED, step])
        # one draw, evenly spread over the rows: all batches have similar shares of each kind
        draw = rng.random()
        rows = [self.row(rng, (draw + i / num_rows) % 1) for i in range(num_rows)]
        tokens = np.array([row.tokens for row in rows], dtype=np.int64)
        answers = np.array([row.answers for row in rows])[:, 1:]
        weights = np.where(answers, ANSWER_WEIGHT, 1.0)
        return tokens, weights.astype(np.float32)

    def row(self, rng: np.random.Generator, kind: float) -> Passage:
        """One row; kind: 0 to 1, divided by the shares."""
        if kind < BOOK_SHARE:
            return self.window(rng, self.length + 1)
        if kind < BOOK_SHARE + PASSKEY_SHARE:
            return self.passkeys(rng)
        return self.sums(rng)

    def window(self, rng: np.random.Generator, length: int) -> Passage:
        """A stretch of the training books."""
        start = int(rng.integers(0, len(self.books) - length + 1))
        return Passage(self.books[start : start + length].tolist(), [False] * length)

    def passkeys(self, rng: np.random.Generator) -> Passage:
        """Book text with up to ten pass keys and their questions; the first key's comes last."""
        total = self.length + 1
        count = int(rng.integers(1, max(2, min(11, total // 200))))
        pairs = [
            passkey(self.tokenizer, place, int(rng.integers(10_000, 100_000)))
            for place in rng.choice(PLACES, size=count, replace=False)
        ]
        filler = total - sum(len(p.tokens) for pair in pairs for p in pair)
        # place in the filler, tie-break, passage
        events: list[tuple[int, int, Passage]] = []
        for i, (statement, question) in enumerate(pairs):
            gap = int(np.exp(rng.uniform(np.log(8), np.log(filler))))
            end = filler if i == 0 else int(rng.integers(gap, filler + 1))
            events.append((end - gap, 1, statement))
            events.append((end, 2 if i == 0 else 0, question))
        events.sort(key=lambda event: event[:2])
        return weave(self.window(rng, filler).tokens, events)

    def sums(self, rng: np.random.Generator) -> Passage:
        """Arithmetic passages one after the other, cut at the row's end."""
        tokens: list[int] = []
        answers: list[bool] = []
        while len(tokens) <= self.length:
            steps = int(rng.integers(1, 9))
            task_first = bool(rng.random() < 0.6)
            passage = arithmetic(self.tokenizer, rng, steps, task_first=task_first)
            tokens += passage.tokens
            answers += passage.answers
        return Passage(tokens[: self.length + 1], answers[: self.length + 1])
