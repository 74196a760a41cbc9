#!/usr/bin/env python3
"""Makes kernels.ptx of kernels.cu, both beside this file. Needs no GPU:

    pip install nvidia-cuda-nvrtc-cu11==11.8.89
    python3 make_ptx.py [PATH OF libnvrtc.so.11.2]
"""

import ctypes
import glob
import pathlib
import site
import sys

HERE = pathlib.Path(__file__).parent
OPTIONS = [b"--gpu-architecture=compute_70", b"--std=c++14"]


def library():
    if len(sys.argv) > 1:
        return sys.argv[1]
    for folder in site.getsitepackages() + [site.getusersitepackages()]:
        for found in glob.glob(f"{folder}/nvidia/cuda_nvrtc/lib/libnvrtc.so.11.2"):
            return found
    sys.exit("no libnvrtc.so.11.2; see the head of this file")


def main():
    nvrtc = ctypes.CDLL(library())

    def check(code, program=None):
        if code == 0:
            return
        if program is not None:
            size = ctypes.c_size_t()
            nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
            log = ctypes.create_string_buffer(size.value)
            nvrtc.nvrtcGetProgramLog(program, log)
            print(log.value.decode(), file=sys.stderr)
        sys.exit(f"NVRTC: error {code}")

    source = (HERE / "kernels.cu").read_bytes()
    program = ctypes.c_void_p()
    check(nvrtc.nvrtcCreateProgram(ctypes.byref(program), source, b"kernels.cu", 0, None, None))
    options = (ctypes.c_char_p * len(OPTIONS))(*OPTIONS)
    check(nvrtc.nvrtcCompileProgram(program, len(OPTIONS), options), program)
    size = ctypes.c_size_t()
    check(nvrtc.nvrtcGetPTXSize(program, ctypes.byref(size)))
    ptx = ctypes.create_string_buffer(size.value)
    check(nvrtc.nvrtcGetPTX(program, ptx))
    # NVRTC writes its own version of the language, of which the kernels use nothing: an older one is taken by older drivers.
    text = ptx.value.replace(b".version 7.8\n", b".version 7.0\n")
    (HERE / "kernels.ptx").write_bytes(text.rstrip() + b"\n")


main()
