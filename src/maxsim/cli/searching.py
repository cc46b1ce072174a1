"""Commands that ask a corpus: search, rerank."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from .. import sources
from . import ranks
from .changes import filter_of, id_in
from .errors import check_same, check_width, device_of, plain_errors, refusals
from .options import CorpusPath, Device, Json, Model
from .output import passed_over, print_hits, print_json, warn, warn_cut

if TYPE_CHECKING:
    from ..encode import Encoder
    from ..search import Corpus, Hit


PAGES = (".html", ".htm")


class Search(TyperCommand):
    """`--explain` with a value or without one, which the parser does not know: what follows is its value where that is
    the name of a page, and a query otherwise."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        end = args.index("--") if "--" in args else len(args)
        for n, word in enumerate(args[:end]):
            if word == "--explain" and not "".join(args[n + 1 : n + 2]).lower().endswith(PAGES):
                args = [*args[:n], "--explain=", *args[n + 1 :]]
        return super().parse_args(ctx, args)


@plain_errors
def search(
    corpus: CorpusPath,
    query: Annotated[list[str] | None, typer.Argument(help="One or more queries.")] = None,
    queries: Annotated[
        Path | None,
        typer.Option(
            help="Read queries from a file or folder, in the forms of `index`; - is the standard input, one a line."
        ),
    ] = None,
    k: Annotated[int, typer.Option("-k", min=0, help="Hits for each query.")] = 10,
    filter: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FIELD=VALUE",
            help="Only documents with this in their metadata; of one field any of several will do. 2024 is the number "
            'and the text, "2024" in double quotes the text alone.',
        ),
    ] = None,
    explain: Annotated[
        str | None,
        typer.Option(
            metavar="[PAGE.html]",
            help="Show which token of the document each query token matched: here, or on a page that a browser shows. "
            "Several queries have a page each, PAGE-1.html and so on.",
        ),
    ] = None,
    model: Model = None,
    device: Device = None,
    as_json: Json = False,
) -> None:
    """Find the best documents for each query, exactly.

    With several GPUs or machines: `torchrun --nproc-per-node 4 -m maxsim search CORPUS QUERY` shares the corpus out
    among the processes, each of which has a GPU of its own, or with `--device cpu` its share of the cores.
    """
    asked: list[tuple[str | int | None, str]] = [(None, _not_empty(text)) for text in query or []]
    if queries is not None:
        standard, empty = str(queries) == "-", list[str]()
        if standard and ranks.started_by_torchrun():
            raise typer.BadParameter("several processes cannot read one standard input", param_hint="--queries")
        read = sources.read_stream(sys.stdin.buffer, "stdin") if standard else sources.read(queries, empty)
        asked += [(text.id, text.text) for text in read]
        if empty:
            warn(passed_over(empty, "query"))
    fields = filter_of(filter or [])
    page = _page_of(explain)
    if not asked:
        raise typer.BadParameter("give at least one query, or --queries FILE", param_hint="QUERY")
    from .. import indexing
    from ..explaining import page as page_of
    from ..search import Corpus, together

    with ranks.joined(device) as rank:
        with rank.together():
            opened = Corpus.open(corpus, rank.device, shard=rank.shard)
            encoder = _encoder_of(opened, model)
            embeddings = encoder.queries([text for _, text in asked])
        with refusals():
            if rank.talk is None:
                found = opened.search(embeddings, k, filter=fields)
            else:
                found = together(opened, embeddings, k, filter=fields)
    if rank.shard[0]:  # the first rank speaks for all
        return
    if fields and not any(found):
        for field in opened.fields_without_documents(fields):
            warn(f"no document has a field {field!r} in its metadata")
    warn_cut(encoder.cut_queries, "query", encoder.query_limit, "is not searched for")
    results: list[dict[str, Any]] = []
    for (id, text), embedding, hits in zip(asked, embeddings, found, strict=True):
        rows = _rows(opened, hits)
        result = {**({} if id is None else {"id": id}), "query": text, "hits": rows}
        if explain is not None:
            with refusals():
                found_of = [indexing.explain(opened, encoder, text, row["id"], embedding) for row in rows]
            if page is None:
                for row, explanation in zip(rows, found_of, strict=True):
                    row["matches"] = [match._asdict() for match in explanation.matches]
                    row["notes"] = list(explanation.notes)
            elif found_of:
                path = page if len(asked) == 1 else page.with_stem(f"{page.stem}-{len(results) + 1}")
                path.write_text(page_of(found_of), encoding="utf-8")
                result["page"] = str(path)
        results.append(result)
    if as_json:
        print_json(results)
    else:
        print_hits(results)


@plain_errors
def rerank(
    corpus: CorpusPath,
    query: Annotated[str, typer.Argument(help="The query.")],
    ids: Annotated[list[str], typer.Argument(help="Candidates; digits also stand for the whole number.")],
    k: Annotated[int | None, typer.Option("-k", min=0, help="Only the k best.")] = None,
    model: Model = None,
    device: Device = None,
    as_json: Json = False,
) -> None:
    """Order some documents by their exact scores for a query; only these are read."""
    _not_empty(query)
    from ..search import Corpus

    opened = Corpus.open(corpus, device_of(device))
    encoder = _encoder_of(opened, model)
    embeddings = encoder.queries([query])
    warn_cut(encoder.cut_queries, "query", encoder.query_limit, "is not searched for")
    with refusals():
        (hits,) = opened.rerank(embeddings, [id_in(opened, id) for id in ids], k)
    results = [{"query": query, "hits": _rows(opened, hits)}]
    if as_json:
        print_json(results)
    else:
        print_hits(results)


def _page_of(explain: str | None) -> Path | None:
    """The page to write, None where matches are printed."""
    if not explain:
        return None
    path = Path(explain)
    if path.suffix.lower() not in PAGES:
        raise typer.BadParameter(f"a page is a file that ends in .html, got {explain!r}", param_hint="--explain")
    if not path.parent.is_dir():
        raise typer.BadParameter(f"no folder {path.parent} for the page", param_hint="--explain")
    return path


def _not_empty(query: str) -> str:
    if not query.strip():
        raise typer.BadParameter("a query must not be empty", param_hint="QUERY")
    return query


def _encoder_of(corpus: Corpus, model: str | None) -> Encoder:
    """The encoder asked for, which must be the one that the corpus was made with."""
    from .. import encode

    name = model or corpus.encoder
    if name is None:
        raise encode.EncoderError(f"{corpus.path} does not say which model made its embeddings; give --model")
    if corpus.encoder is not None:
        check_same("model", name, corpus.encoder, corpus.path)
    encoder = encode.load(name, corpus.device)
    check_width(encoder, corpus)
    return encoder


def _rows(corpus: Corpus, hits: list[Hit]) -> list[dict[str, Any]]:
    """Hits with what the corpus keeps beside them."""
    ids = [hit.id for hit in hits]
    texts, metadata = corpus.texts(ids), corpus.metadata(ids)
    return [
        {"id": hit.id, "score": hit.score, "text": texts.get(hit.id), "metadata": metadata.get(hit.id)} for hit in hits
    ]
