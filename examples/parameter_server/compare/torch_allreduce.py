#!/usr/bin/env python3
"""The parameter server's training with PyTorch: every process has the model, and one all-reduce per step sums up the gradients.

    python3 torch_allreduce.py --workers 4 --backend gloo --data ../data/digits.bin

Prints one line of JSON. Made to be as fast as its plain form goes: parameters and gradients are one flat tensor each, data and batches lie on
the GPU before the clock starts, nothing is read back between steps, and there is no DataLoader. `--via host` copies the flat gradient
to pinned memory and lets gloo work there; `--via direct` gives gloo the GPU's tensor.
"""

import argparse
import json
import math
import os
import queue
import socket
import sys
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F

PIXELS, HIDDEN, CLASSES = 64, 64, 10
SHAPES = [(PIXELS, HIDDEN), (HIDDEN,), (HIDDEN, CLASSES), (CLASSES,)]
PARAMETERS = sum(math.prod(shape) for shape in SHAPES)


def options():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="digits.bin")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--backend", choices=["gloo", "nccl"], default="gloo")
    parser.add_argument("--via", choices=["direct", "host"], default="direct", help="what gloo reduces")
    parser.add_argument("--gpus", type=int, default=1, help="workers are spread over so many; 0 is the CPU")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--rate", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=0, help="end after so long, if the epochs take longer")
    parser.add_argument("--warm-up", type=int, default=50, help="steps before the clock starts, part of the training")
    parser.add_argument("--interactive", action="store_true", help="a training for each line of standard input")
    return parser.parse_args()


def load(path, device):
    rows = torch.frombuffer(bytearray(open(path, "rb").read()), dtype=torch.uint8).view(-1, PIXELS + 1)
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(20))
    rows = rows[order]
    pixels, classes = rows[:, :PIXELS].float() / 16, rows[:, PIXELS].long()
    held_out = len(rows) // 5
    parts = (pixels[:-held_out], classes[:-held_out], pixels[-held_out:], classes[-held_out:])
    return [part.to(device) for part in parts]


def views(flat):
    at, parts = 0, []
    for shape in SHAPES:
        size = math.prod(shape)
        parts.append(flat[at : at + size].view(shape))
        at += size
    return parts


def forward(parameters, x):
    weights1, biases1, weights2, biases2 = parameters
    return torch.addmm(biases2, torch.relu(torch.addmm(biases1, x, weights1)), weights2)


def work(rank, options, port, gate, starts, results):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    # All are on this machine, whose name may lead nowhere.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    device, synchronize = torch.device("cpu"), lambda: None
    if options.gpus > 0:
        device, synchronize = torch.device("cuda", rank % options.gpus), torch.cuda.synchronize
        torch.cuda.set_device(device)
        torch.backends.cuda.matmul.allow_tf32 = False
    dist.init_process_group(options.backend, rank=rank, world_size=options.workers)
    data = load(options.data, device)
    while True:
        go = rank == 0 and starts.get()
        # Waits without using a processor, of either kind.
        gate.wait()
        word = torch.tensor([float(go)], device=device)
        dist.all_reduce(word)
        if word.item() == 0:
            break
        result = train(rank, options, device, synchronize, data)
        if rank == 0:
            results.put(result)
    dist.destroy_process_group()


def train(rank, options, device, synchronize, data):
    pixels, classes, test_pixels, test_classes = data
    generator = torch.Generator().manual_seed(options.seed)
    flat = torch.zeros(PARAMETERS)
    for part, inputs in zip(views(flat)[::2], (PIXELS, HIDDEN)):
        part.uniform_(-1, 1, generator=generator).mul_(math.sqrt(6 / inputs))
    flat = flat.to(device)
    flat_gradient = torch.zeros_like(flat)
    parameters = [part.detach().requires_grad_() for part in views(flat)]
    for parameter, gradient in zip(parameters, views(flat_gradient)):
        parameter.grad = gradient
    via_host = options.via == "host" and options.gpus > 0
    on_host = torch.zeros(PARAMETERS, pin_memory=True) if via_host else None

    def step(x, y):
        flat_gradient.zero_()
        F.cross_entropy(forward(parameters, x), y).backward()
        if via_host:
            on_host.copy_(flat_gradient, non_blocking=True)
            torch.cuda.current_stream().synchronize()
            dist.all_reduce(on_host)
            flat_gradient.copy_(on_host, non_blocking=True)
        else:
            dist.all_reduce(flat_gradient)
        # Each gradient counts with the same rate, as at the parameter server.
        flat.sub_(flat_gradient, alpha=options.rate)

    share = len(pixels) // options.workers
    batches = share // options.batch
    if batches == 0:
        raise SystemExit(f"a worker's share is {share} samples, less than a batch of {options.batch}; use fewer workers or smaller batches")
    warm_up = min(options.warm_up, options.epochs * batches - 1)
    steps, started = 0, None
    for epoch in range(options.epochs):
        order = torch.randperm(len(pixels), generator=generator)[rank * share : (rank + 1) * share].to(device)
        epoch_x = pixels[order].split(options.batch)
        epoch_y = classes[order].split(options.batch)
        for x, y in zip(epoch_x[:batches], epoch_y[:batches]):
            if steps == warm_up:
                synchronize()
                dist.barrier()
                started = time.perf_counter()
            step(x, y)
            steps += 1
        # All end in the same epoch. A small all-reduce in many steps makes no difference.
        if options.seconds > 0 and started is not None and epoch % 8 == 7:
            late = torch.tensor([float(time.perf_counter() - started > options.seconds)], device=device)
            dist.all_reduce(late)
            if late.item() > 0:
                break
    synchronize()
    dist.barrier()
    seconds = time.perf_counter() - started
    flat_still = all(p.grad.data_ptr() == g.data_ptr() for p, g in zip(parameters, views(flat_gradient)))
    assert flat_still, "PyTorch has put gradients elsewhere"
    with torch.no_grad():
        right = forward(parameters, test_pixels).argmax(1) == test_classes
    return {
        "program": "torch",
        "torch": torch.__version__,
        "backend": options.backend,
        "via": options.via,
        "device": torch.cuda.get_device_name(0) if options.gpus > 0 else "CPU",
        "workers": options.workers,
        "gpus": options.gpus,
        "batch": options.batch,
        "steps": steps - warm_up,
        "seconds": round(seconds, 4),
        "steps_per_second": round((steps - warm_up) / seconds, 1),
        "accuracy": round(right.float().mean().item(), 4),
    }


def main():
    given = options()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = mp.get_context("spawn")
    gate, starts, results = context.Barrier(given.workers), context.Queue(), context.Queue()
    arguments = (given, port, gate, starts, results)
    workers = mp.spawn(work, args=arguments, nprocs=given.workers, join=False)
    for _ in sys.stdin if given.interactive else range(1):
        starts.put(True)
        while True:
            try:
                print(json.dumps(results.get(timeout=0.2)), flush=True)
                break
            except queue.Empty:
                # Raises what a worker has failed with.
                if workers.join(timeout=0):
                    sys.exit("the workers have ended")
    starts.put(False)
    while not workers.join():
        pass


if __name__ == "__main__":
    main()
