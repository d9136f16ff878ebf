"""Grammars compiled for one vocabulary, by a thread of their own."""

from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from threading import Lock
from weakref import WeakValueDictionary

from disagg.grammar.state import GrammarState
from disagg.grammar.vocabulary import Vocabulary

# of the grammars that stay compiled though nothing waits for them: how many, and how long their
# texts are together. A character may take 200 bytes
MOST_UNUSED = 128
MOST_UNUSED_CHARS = 1 << 20


class GrammarCompiler:
    """Compiles each constraint once, for all requests that have it. Any thread may call it.

    Without requests that have a grammar it costs nothing: the vocabulary is read, and the thread
    started, for the first one.
    """

    def __init__(self, read_vocabulary: Callable[[], Vocabulary]):
        self._read_vocabulary = read_vocabulary
        # all that somebody holds; the newest are held here
        self._compiled: WeakValueDictionary[str, Future[GrammarState]]
        self._compiled = WeakValueDictionary()
        self._newest: OrderedDict[str, Future[GrammarState]] = OrderedDict()
        self._lock = Lock()

    @cached_property
    def _thread(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(1, thread_name_prefix="grammars")

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """Of the model. Reading it takes a second, so only the thread of this compiler does."""
        return self._read_vocabulary()

    def prepare(self, constraint: str) -> "Future[GrammarState]":
        """Compile a constraint in the background; the result is the state before the first token.

        It is for copies alone. As long as somebody holds it, it is not compiled again.
        """
        with self._lock:
            future = self._compiled.get(constraint)
            if future is None:
                future = self._thread.submit(self._compile, constraint)
                self._compiled[constraint] = future
            self._newest[constraint] = future
            self._newest.move_to_end(constraint)
            self._drop_unused()
            return future

    def _drop_unused(self) -> None:
        """Hold no more than the limits allow; the oldest go first."""
        num_chars = sum(map(len, self._newest))
        while len(self._newest) > MOST_UNUSED or num_chars > MOST_UNUSED_CHARS:
            constraint, _ = self._newest.popitem(last=False)
            num_chars -= len(constraint)

    def _compile(self, constraint: str) -> GrammarState:
        return GrammarState.compile(constraint, self.vocabulary)
