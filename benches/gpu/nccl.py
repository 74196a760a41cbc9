"""What NCCL takes for the same: 64 MiB from one GPU's process to another's, by send and receive through PyTorch.

    python3 benches/gpu/nccl.py [--rounds 7] [--bytes 67108864] [--times 200]

Prints a line of JSON. Needs PyTorch with CUDA, and two GPUs.
"""

import argparse
import json
import os
import socket
import statistics
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def work(rank, port, options, results):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", rank=rank, world_size=2, device_id=torch.device("cuda", rank))
    memory = [torch.full((options.bytes,), rank + 1, dtype=torch.uint8, device="cuda") for _ in range(4)]

    def transfer(buffer):
        dist.send(buffer, 1) if rank == 0 else dist.recv(buffer, 0)

    def one_by_one():
        rates = []
        for _ in range(options.times):
            torch.cuda.synchronize()
            started = time.perf_counter()
            transfer(memory[0])
            torch.cuda.synchronize()
            rates.append(options.bytes / (time.perf_counter() - started) / 1e9)
        return statistics.median(rates)

    def several():
        torch.cuda.synchronize()
        started = time.perf_counter()
        for time_ in range(options.times):
            transfer(memory[time_ % len(memory)])
        torch.cuda.synchronize()
        return options.bytes * options.times / (time.perf_counter() - started) / 1e9

    one_by_one()
    rounds = []
    for _ in range(options.rounds):
        dist.barrier()
        rounds.append((one_by_one(), several()))
    if rank == 1:
        assert all(int(buffer[-1]) == 1 for buffer in memory)
        results.put(rounds)
    dist.destroy_process_group()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--bytes", type=int, default=64 << 20)
    parser.add_argument("--times", type=int, default=200)
    options = parser.parse_args()
    if torch.cuda.device_count() < 2:
        raise SystemExit("skipped: NCCL sends between two GPUs, and there are not two")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = mp.get_context("spawn")
    results = context.SimpleQueue()
    mp.spawn(work, (port, options, results), nprocs=2)
    single, streamed = zip(*results.get())
    figures = {
        "bytes": options.bytes,
        "rounds": options.rounds,
        "one at a time, GB/s": round(statistics.median(single), 1),
        "queued, GB/s": round(statistics.median(streamed), 1),
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        "torch": torch.__version__,
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
