#!/bin/sh
# Run on both nodes: NODE=0 or 1, HOST=<address of node 0>. With GPUs: --nproc-per-node gpu, --device cuda.
# Two nodes on one machine, for a test: HOST=127.0.0.1, and LOCAL_ADDR=127.0.0.1 or 127.0.0.2.
set -e
torchrun --nnodes 2 --node-rank "${NODE:?}" --nproc-per-node "${WORKERS:-1}" --max-restarts 3 \
  --rdzv-backend c10d --rdzv-id onnxtrain --rdzv-endpoint "${HOST:?}:${PORT:-29400}" \
  --local-addr "${LOCAL_ADDR:-$(hostname -i)}" "$(dirname "$0")/train.py" "$@"
