# The same command on every host. FIRST is a host that stays: its agent hosts the store.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 # so that hosts can rejoin
torchrun --nnodes 1:2 --nproc-per-node 2 --max-restarts 100 \
    --rdzv-backend c10d --rdzv-id run-a --rdzv-endpoint "$FIRST" \
    train.py run.toml runs/a
