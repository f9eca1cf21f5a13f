#!/usr/bin/env bash
# The GPU day: a transformer of LTX-2.3's width with 8 of its 48 layers and random weights, within 8 minutes.
# Prints how busy the device is, samples per GPU-hour, peak memory, and what a row's bits depend on.
# `benchmarks/gpu.sh --smallest` tries the same on a CPU.
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON="${PYTHON:-.venv/bin/python}"
timeout 480 "$PYTHON" -m benchmarks.bench_gpu "$@"
