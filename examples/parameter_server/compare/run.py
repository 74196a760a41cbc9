#!/usr/bin/env python3
"""Steps per second of the parameter server and of PyTorch, on this machine, in turns.

    python3 run.py target/release/examples/parameter_server

Needs python3 with PyTorch, `torch_allreduce.py` beside this file, and the data. Takes over a minute. All train the same model on the same
digits with the same batch, rate and number of workers, each worker a process of its own unless it says otherwise. In each round each of
them has its turn; what is printed is the median of the rounds, with the lowest and the highest, and the ratio to PyTorch's gloo, the
faster of its two ways.
"""

import argparse
import json
import os
import pathlib
import re
import statistics
import subprocess
import sys

HERE = pathlib.Path(__file__).resolve().parent
# What becomes of a training that hangs.
LIMIT = 60


def options():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("binary")
    parser.add_argument("--data", default=HERE.parent / "data" / "digits.bin")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--gpus", type=int, default=1, help="0 leaves everything on GPUs out")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--rate", type=float, default=0.1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.8, help="how long one training is to take, roughly")
    parser.add_argument("--json", help="write all figures to this file")
    return parser.parse_args()


class Ours:
    """A training by the parameter server, as many epochs as fill the time."""

    def __init__(self, given, compute, *more):
        self.given, self.compute, self.more = given, compute, more
        self.epochs = 100

    def run(self):
        given = self.given
        command = [given.binary, "--compute", self.compute, "--workers", given.workers, "--batch", given.batch]
        command += ["--rate", given.rate, "--epochs", self.epochs, "--log-every", 1_000_000]
        if self.compute == "gpu":
            command += ["--gpus", given.gpus]
        command += self.more
        environment = {"TOKIO_RDMA_DEVICE": "soft0", "TOKIO_RDMA_LINK": "auto"} | os.environ
        done = subprocess.run(
            [str(it) for it in command], capture_output=True, text=True, timeout=LIMIT, env=environment
        )
        if done.returncode != 0:
            sys.exit(f"{command}: {done.stdout}{done.stderr}")
        speed = float(re.search(r"^\d+ steps, synchronous, (\d+)/s", done.stdout, re.M)[1])
        accuracy = float(re.search(r"^test accuracy ([\d.]+)", done.stdout, re.M)[1])
        if speed > 0:
            per_epoch = -(-1438 // given.batch) / given.workers
            self.epochs = max(20, int(speed * given.seconds / per_epoch))
        return speed, accuracy

    def end(self):
        pass


class Torch:
    """PyTorch's processes, which wait between trainings."""

    def __init__(self, given, *more):
        command = [sys.executable, HERE / "torch_allreduce.py", "--data", given.data, "--workers", given.workers]
        command += ["--batch", given.batch, "--rate", given.rate, "--seconds", given.seconds, "--epochs", 100_000]
        command += [*more, "--interactive"]
        self.process = subprocess.Popen(
            [str(it) for it in command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def run(self):
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            sys.exit("PyTorch's processes have ended")
        result = json.loads(line)
        return result["steps_per_second"], result["accuracy"]

    def end(self):
        self.process.stdin.close()
        try:
            self.process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self.process.kill()


def main():
    given = options()
    # Begun first: they take longest to start.
    contenders = {}
    if given.gpus > 0:
        spread = ["--gpus", given.gpus]
        contenders["PyTorch, gloo, tensors of the GPU"] = Torch(given, "--backend", "gloo", "--via", "direct", *spread)
        contenders["PyTorch, gloo, through the host"] = Torch(given, "--backend", "gloo", "--via", "host", *spread)
        if given.gpus >= given.workers:
            contenders["PyTorch, nccl"] = Torch(given, "--backend", "nccl", *spread)
        contenders["parameter server, GPU"] = Ours(given, "gpu")
        # Processes take turns on a GPU; workers of one process do not.
        together = -(-given.workers // given.gpus)
        contenders["parameter server, GPU, one worker process a GPU"] = Ours(given, "gpu", "--per-process", together)
    else:
        contenders["PyTorch, gloo, CPU"] = Torch(given, "--backend", "gloo", "--gpus", 0)
    contenders["parameter server, CPU"] = Ours(given, "cpu")

    figures = {name: [] for name in contenders}
    for round_ in range(given.rounds + 1):
        for name, contender in contenders.items():
            speed, accuracy = contender.run()
            print(f"round {round_}: {name}: {speed:.0f} steps/s, accuracy {accuracy:.3f}", file=sys.stderr, flush=True)
            # The first one only warms up, and tells how many epochs fill the time.
            if round_ > 0:
                figures[name].append((speed, accuracy))
    for contender in contenders.values():
        contender.end()

    medians = {name: statistics.median(speed for speed, _ in runs) for name, runs in figures.items()}
    peer = max(median for name, median in medians.items() if "gloo" in name)
    print(f"{given.workers} workers, batches of {given.batch}, {given.gpus} GPUs, {given.rounds} rounds")
    print("| | steps/s, median | lowest to highest | accuracy | to gloo |\n|---|---|---|---|---|")
    for name, runs in figures.items():
        speeds, accuracy = [speed for speed, _ in runs], statistics.median(accuracy for _, accuracy in runs)
        spread = f"{min(speeds):.0f} to {max(speeds):.0f}"
        print(f"| {name} | {medians[name]:.0f} | {spread} | {accuracy:.3f} | {medians[name] / peer:.2f} |")
    if given.json:
        pathlib.Path(given.json).write_text(json.dumps({"options": vars(given), "runs": figures}, default=str, indent=1))


main()
