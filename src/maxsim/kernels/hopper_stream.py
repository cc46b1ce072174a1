"""How Hopper kernels share out documents: streams of documents for programs, and where each document lies.

The work is every query tile with every document (or those of its query alone), query tile by query tile; a stream is a
run of it with an equal share of tokens (documents that follow one another) or of documents. Every partition of a
program finds the same run, and the same tiles, by itself. A stream begins with a document, or SPLIT inside of one, a
multiple of BLOCK_LD tokens from its first: so few documents too are equal shares.
"""

from __future__ import annotations

from .gluon_names import gl, gluon

# Of all Hopper kernels: sizes never make a new variant.
RUN_TIME = (
    "q_tiles", "NQ", "ND", "LQ", "LD", "TQ", "TD", "D", "parts", "block_log2", "q_item", "q_row", "d_item",
    "winner_columns", "K",
)  # fmt: skip
# Their alignment changes with what is cut out of them, and no load of theirs is wide.
TABLES = (
    "out_ptr", "winners_ptr", "maxima_ptr", "q_starts", "q_ends", "q_kept_rows", "q_kept", "starts", "ends", "bases",
    "d_bits", "gaps", "q_scales", "scales",
)  # fmt: skip


@gluon.jit
def fetch(doc, last, starts, ends):
    """What memory says of a document's place, as it stands there: nothing waits for it until `enter` does."""
    if starts is None:
        return 0, 0
    else:
        doc = min(doc, last - 1)
        return gl.load(starts + doc), gl.load(ends + doc)


@gluon.jit
def clamped(row, TD):
    """A row of the buffer of documents, whatever offsets say."""
    return min(max(row, 0), TD).to(gl.int32)


@gluon.jit
def enter(doc, last, start, end, starts, ends, LD, d_item, TD, edges=None, CONSECUTIVE: gl.constexpr = False):
    """Row of a document's first token, and one past the last, from what was fetched of it; and what is fetched of the
    next one. edges: from `edges_of`. CONSECUTIVE: a document begins where the one before it ends, so `start` is not
    fetched: it comes, and is returned for the next one, as a row (`clamped`)."""
    if starts is None:
        first = doc * d_item
        past = first + LD
    else:
        edge = clamped(end, TD)
        first = start if CONSECUTIVE else clamped(start, TD)
        past = first + min(max(edge - first, 0), LD)
    if edges is not None:
        begin, head, tail = edges
        past = gl.where(doc == last - 1, min(past, first + tail), past)
        first = gl.where(doc == begin, first + head, first)
        past = max(past, first)
    next_start, next_end = fetch(doc + 1, last, starts, ends)
    return first, past, edge if CONSECUTIVE else next_start, next_end


@gluon.jit
def tile_from(first, FACTORS: gl.constexpr):
    """Where the first tile of a document begins: there, or with numbers beside each row, of which the copy engine takes
    16 bytes from multiples of 16 on, at most 7 rows before."""
    if FACTORS:
        return first & -8
    else:
        return first


@gluon.jit
def segment(at, end, q_tiles, ND, K=None):
    """The part of a stream that belongs to one query tile: which, its first document, and one past its last. K: each
    query has as many documents of its own, and q_tiles."""
    if K is None:
        tile = at // ND
        return tile, (at - tile * ND).to(gl.int32), min(end - tile * ND, ND.to(gl.int64)).to(gl.int32)
    else:
        tile = at // K
        own = tile // q_tiles * K
        before = tile * K - own
        return tile, (at - before).to(gl.int32), min(end - before, own + K).to(gl.int32)


@gluon.jit
def edges_of(at, end, cuts, tile, doc, last, ND, LD):
    """Of a segment of a stream with cuts: its first document, how many tokens of it the stream before has, and how
    many of the last document are not left to the next."""
    begin, head, tail = cuts
    return doc, gl.where(at == begin, head, 0), gl.where(tile * ND + last == end, tail, LD)


@gluon.jit
def _first_from(row, starts, ND, WARPS: gl.constexpr):
    """The first document that starts at or after a row, by a search with 128 arms."""
    arm = gl.arange(0, 128, gl.BlockedLayout([4 // WARPS], [32], [WARPS], [0]))
    low = ND * 0
    high = ND
    while low < high:
        stride = (high - low + 127) // 128
        at = low + stride * arm
        start = gl.load(starts + at, mask=at < high, other=2147483647).to(gl.int64)
        below = gl.sum((start < row).to(gl.int32), 0)
        high = min(high, low + stride * below)
        low = low + max(stride * (below - 1) + 1, 0)
        low = min(low, high)
    return low


@gluon.jit
def cut(stream, streams, q_tiles, ND, TD, starts, BY_TOKENS: gl.constexpr, WARPS: gl.constexpr):
    """Where the work of a stream begins, as query tile · ND + document: equal shares of tokens where documents follow
    one another, else of documents."""
    if BY_TOKENS:
        token = (stream.to(gl.int64) * q_tiles * TD) // streams
        tile = token // TD
        at = tile * ND
        if token % TD > 0:
            at += _first_from(token % TD, starts, ND, WARPS)
    else:
        at = (stream.to(gl.int64) * q_tiles * ND) // streams
    return at


@gluon.jit
def _cut_inside(stream, streams, q_tiles, ND, LD, TD, starts, BLOCK_LD: gl.constexpr, WARPS: gl.constexpr):
    """`cut` for equal shares of tokens, whatever documents they belong to; and how many of that document's lie before.
    A query tile begins with its document 0."""
    tokens = ND.to(gl.int64) * LD if starts is None else TD.to(gl.int64)
    token = (stream.to(gl.int64) * q_tiles * tokens) // streams
    tile = token // tokens
    row = token - tile * tokens
    doc = row * 0
    before = doc
    if starts is None:
        doc = row // LD
        before = row - doc * LD
    elif row > 0:
        doc += max(_first_from(row + 1, starts, ND, WARPS) - 1, 0)
        before = max(row - clamped(gl.load(starts + doc), TD), 0)
    return tile * ND + doc, (before // BLOCK_LD * BLOCK_LD).to(gl.int32)


@gluon.jit
def share(
    stream, streams, q_tiles, ND, LD, TD, starts,
    BY_TOKENS: gl.constexpr, SPLIT: gl.constexpr, BLOCK_LD: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Where the work of a stream begins and ends, as in `cut`; SPLIT: and for `edges_of` where in its first and last
    document. `queries.sum_pieces` finds by the same rule which streams had a document."""
    if SPLIT:
        at, head = _cut_inside(stream, streams, q_tiles, ND, LD, TD, starts, BLOCK_LD, WARPS)
        end, tail = _cut_inside(stream + 1, streams, q_tiles, ND, LD, TD, starts, BLOCK_LD, WARPS)
        return at, end + gl.where(tail > 0, 1, 0), (at, head, gl.where(tail > 0, tail, LD))
    else:
        at = cut(stream, streams, q_tiles, ND, TD, starts, BY_TOKENS, WARPS)
        return at, cut(stream + 1, streams, q_tiles, ND, TD, starts, BY_TOKENS, WARPS), (0, 0, 0)


@gluon.jit
def kept_words(bits, row, WORDS: gl.constexpr):
    """Which rows from `row` on are kept: a tuple of words of 32 rows."""
    at = bits + (row >> 5)
    words = ()
    low = gl.load(at).to(gl.uint32).to(gl.uint64)
    for g in gl.static_range(WORDS):
        high = gl.load(at + g + 1).to(gl.uint32).to(gl.uint64)
        words = words + ((((high << 32) | low) >> (row & 31)).to(gl.int32),)  # type: ignore[assignment]
        low = high
    return words


@gluon.jit
def _any_kept(bits, row, BLOCK_LD: gl.constexpr):
    words = kept_words(bits, row, BLOCK_LD // 32)
    kept = words[0]
    for g in gl.static_range(1, BLOCK_LD // 32):
        kept = kept | words[g]
    return kept != 0


@gluon.jit
def next_kept(bits, row, BLOCK_LD: gl.constexpr):
    """The first tile from `row` on that has a kept row; there is one."""
    while not _any_kept(bits, row, BLOCK_LD):
        row += BLOCK_LD
    return row


@gluon.jit
def each_tile(
    stream, streams, q_tiles, starts, ends, d_bits, ND, LD, TD, d_item,
    BY_TOKENS: gl.constexpr, BLOCK_LD: gl.constexpr, WARPS: gl.constexpr, visit: gl.constexpr, rest,
    SPLIT: gl.constexpr = False, K=None, FACTORS: gl.constexpr = False,
):  # fmt: skip
    """Calls visit(step, row, tile, *rest) for the tiles of a stream, in order, `tile` being the query tile; returns how
    many there are."""
    at, end, cuts = share(stream, streams, q_tiles, ND, LD, TD, starts, BY_TOKENS, SPLIT, BLOCK_LD, WARPS)
    step = 0
    while at < end:
        tile, doc, last = segment(at, end, q_tiles, ND, K)
        edges = edges_of(at, end, cuts, tile, doc, last, ND, LD) if SPLIT else None
        at += last - doc
        start, end_row = fetch(doc, last, starts, ends)
        first, past, start, end_row = enter(doc, last, start, end_row, starts, ends, LD, d_item, TD, edges)
        while doc < last:
            run = past > first
            row = tile_from(first, FACTORS)
            if not run:
                doc += 1
                first, past, start, end_row = enter(doc, last, start, end_row, starts, ends, LD, d_item, TD, edges)
            while run:
                if d_bits is not None:
                    row = next_kept(d_bits, row, BLOCK_LD)
                visit(step, row, tile, *rest)
                step += 1
                row += BLOCK_LD
                while run & (past <= row):
                    before = past
                    doc += 1
                    first, past, start, end_row = enter(doc, last, start, end_row, starts, ends, LD, d_item, TD, edges)
                    run = (doc < last) & (first >= before) & (first < row)
    return step
