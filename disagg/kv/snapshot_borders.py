"""The borders of a prompt: the tokens behind which the states of a hybrid model are copied.

K and V of a prefix can be cut anywhere. A state is that of one token, and the next token replaces
it, so a later prompt resumes only where a copy was taken, a snapshot. It is large, up to 150 MB,
so a prompt has few of them:

    prompt     │ system prompt │ document ........................... │ question │ <think> │
    borders                    shared        far        far                     end

shared  where the prompt departs from prompts before it. The first prompt with this prefix cannot
        know its end. The second one finds K and V of the prefix in the cache and no state: it
        computes the prefix again, and takes the snapshot from which the third one resumes.
far     each FAR_TOKENS tokens: for a second prompt about the same document, and for a long prompt
        that was preempted or aborted.
end     for the next turn of a chat, and for the same prompt again. The last CLOSING_TOKENS tokens
        are left out: with them a chat template opens the answer, and the next turn may not repeat
        them. The end of the answer is no border: other workers generate answers, and templates
        drop the reasoning in them.

Borders are multiples of the 16 tokens in which K and V are cached. Each is at least SPACING_TOKENS
behind the one before, or behind the snapshot that the prompt itself resumed from: fewer tokens are
cheaper to compute than a copy is to keep. So a short prompt has none, and a chat of short turns has
one for several turns.

Engines take snapshots at these borders; routers expect them there.
"""

from disagg.kv.page import RAW_TOKENS

FAR_TOKENS = 4096
SPACING_TOKENS = 64
CLOSING_TOKENS = 8


def snapshot_borders(
    tokens: int, shared: int, resumed: int, least_computed: int = 1
) -> tuple[int, ...]:
    """The borders of a prompt of `tokens` tokens, ascending.

    shared:  leading tokens that an earlier prompt had too
    resumed: leading tokens whose states come from a snapshot
    least_computed: last tokens that every prompt computes, even one that came before
    """
    last_tokens = max(CLOSING_TOKENS, least_computed)
    end = _aligned(tokens - last_tokens)
    candidates = {*range(FAR_TOKENS, end, FAR_TOKENS), _aligned(shared), end}
    borders: list[int] = []
    previous = resumed
    for border in sorted(candidates):
        if previous + SPACING_TOKENS <= border <= end:
            borders.append(border)
            previous = border
    return tuple(borders)


def _aligned(tokens: int) -> int:
    return tokens // RAW_TOKENS * RAW_TOKENS
