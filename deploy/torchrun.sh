#!/usr/bin/env bash
# Train on one or several machines without a scheduler: the same line on each of them.
#
#   deploy/torchrun.sh ddp   configs/qwen3-8b.yaml [options of fit]     every process holds the whole base
#   deploy/torchrun.sh fsdp2 configs/llama2-70b.yaml [options of fit]   processes share the base out among them
#
#   NODES=2 MASTER=10.0.0.1:29500 deploy/torchrun.sh …    on both of two machines; MASTER is the first's address
#   GPUS=4                                                processes on this machine; default: its GPUs
set -euo pipefail

usage="usage: $0 ddp|fsdp2 CONFIG [options of python -m train fit]"
mode=${1:?$usage} config=${2:?$usage}
shift 2
nodes=${NODES:-1} gpus=${GPUS:-$(nvidia-smi -L | wc -l)} accelerator=${ACCELERATOR:-gpu}

case $mode in
    ddp) strategy=(--trainer.strategy ddp) ;;
    fsdp2)
        strategy=(
            --trainer.strategy lightning.pytorch.strategies.ModelParallelStrategy
            --trainer.strategy.data_parallel_size "$((nodes * gpus))"
            --trainer.strategy.tensor_parallel_size 1
            --trainer.strategy.save_distributed_checkpoint false
        )
        ;;
    *) echo "$usage" >&2; exit 2 ;;
esac

launch=(torchrun --nproc-per-node "$gpus" --nnodes "$nodes")
if [ "$nodes" -gt 1 ]; then
    launch+=(--rdzv-backend c10d --rdzv-endpoint "${MASTER:?with NODES=$nodes give MASTER=HOST:PORT, the first machine}")
else
    launch+=(--standalone)
fi

exec "${launch[@]}" -m train fit --config "$config" "${strategy[@]}" \
    --trainer.accelerator "$accelerator" --trainer.num_nodes "$nodes" --trainer.devices "$gpus" "$@"
