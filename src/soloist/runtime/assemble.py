"""From a configuration to a running engine: resolve what was left open, load the model, allocate the state."""

from __future__ import annotations

import dataclasses
import platform
import sys
from dataclasses import dataclass

import torch

from soloist.config import MAX_WINDOW, EngineConfig, ModelConfig, Plan, environment_threads
from soloist.dist.group import Group
from soloist.dist.launch import backend, local_rank, open_group, outline
from soloist.drafters.registry import build_drafter, choose_drafter, is_auto, most_drafted, width_choice
from soloist.errors import UserError
from soloist.models.decoder import Decoder
from soloist.models.registry import load_decoder, read_config
from soloist.runtime.engine import Engine
from soloist.runtime.memory import check_memory, free_bytes, memory_line
from soloist.runtime.ranks import in_step
from soloist.runtime.round import Parts
from soloist.state.buffers import Buffers
from soloist.state.sequence import PAGE_SIZE, Sequence
from soloist.weights.checkpoint import Checkpoint
from soloist.weights.loader import QUIET_BYTES

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

CPU_CHUNK, GPU_CHUNK = 512, 8192


@dataclass(frozen=True)
class Assembled:
    """An engine, the Plan it was built by, and the ranks it runs in step with."""

    engine: Engine
    plan: Plan
    model_config: ModelConfig
    group: Group


def assemble(config: EngineConfig, checkpoint: Checkpoint, progress: bool = False) -> Assembled:
    """Build the engine. Raises: UserError for what the configuration or the checkpoint asks and cannot be had."""
    plan, model_config = resolve(config, checkpoint)
    device = torch.device(plan.device)
    free = free_bytes(device, config.tensor_parallel)
    check_memory(plan, free)
    settings = {**dataclasses.asdict(config), "model": str(checkpoint.path)}
    group = open_group(config.tensor_parallel, config.tp_rank_of, device, settings)
    progress = progress and group.rank == 0
    if progress and plan.parameter_bytes > QUIET_BYTES:
        print(memory_line(plan, free), file=sys.stderr)
    if progress and plan.caveat is not None:
        print(f"soloist: {plan.caveat}", file=sys.stderr)
    plan = dataclasses.replace(plan, exchange=group.exchange)
    try:
        return Assembled(build(plan, config, checkpoint, model_config, group, progress), plan, model_config, group)
    except BaseException as error:
        group.abandon(error)
        raise


def build(
    plan: Plan, config: EngineConfig, checkpoint: Checkpoint, model_config: ModelConfig, group: Group, progress: bool
) -> Engine:
    """Load this rank's share and warm it up, in step with the others."""
    device, dtype = torch.device(plan.device), DTYPES[plan.dtype]
    if device.type == "cpu":
        torch.set_num_threads(plan.threads)
    decoder = load_decoder(checkpoint, model_config, dtype, device, progress, group)
    drafter = build_drafter(plan.drafter, config, checkpoint, decoder)
    widths = in_step(width_choice(config, drafter), group)
    sequence = Sequence(decoder.cache_specs(), plan.context_length, MAX_WINDOW, device)
    bufs = Buffers(model_config.vocab_size, plan.context_length + MAX_WINDOW + 1, device)
    parts = Parts(decoder, sequence, bufs, drafter)
    engine = Engine(
        parts, model_config.vocab_size, plan.prefill_chunk, widths, config.acceptance == "rejection",
        plan.prefix_cache_bytes,
    )  # fmt: skip
    assert drafter.width == plan.draft_width, (drafter.name, drafter.width, plan.draft_width)
    group.meet()  # one may have loaded minutes longer, and kernels that wait for it are not so patient
    engine.warm_up()
    return engine


def resolve(config: EngineConfig, checkpoint: Checkpoint) -> tuple[Plan, ModelConfig]:
    """Decide everything the configuration leaves open. Reads no weights and allocates nothing."""
    model_config = read_config(checkpoint.config)
    group = outline(config.tensor_parallel, config.tp_rank_of)
    device = choose_device(config.device, config.tensor_parallel)
    dtype = choose_dtype(config.dtype, model_config.dtype, device)
    context = choose_context(config.context_length, model_config.max_positions)
    drafter = choose_drafter(config, checkpoint, model_config)
    width = most_drafted(drafter, config, checkpoint)
    shape = torch.device("meta")
    decoder = Decoder(model_config, dtype, shape, group)
    sequence = Sequence(decoder.cache_specs(), context, MAX_WINDOW, shape)
    threads = max(1, torch.get_num_threads() // config.tensor_parallel)
    plan = Plan(
        model=str(checkpoint.path),
        architecture=model_config.architecture,
        num_parameters=num_parameters(checkpoint, decoder),
        parameter_bytes=parameter_bytes(checkpoint, decoder),
        device=str(device),
        device_name=device_name(device),
        dtype=str(dtype).removeprefix("torch."),
        context_length=context,
        prefill_chunk=choose_chunk(config.prefill_chunk, device),
        prefix_cache_bytes=kept_bytes(config),
        threads=config.threads or environment_threads() or threads,
        drafter=drafter,
        draft_width=width,
        width_choice="auto" if is_auto(config) and width else "fixed",
        acceptance=config.acceptance,
        window=width + 1,
        page_size=PAGE_SIZE,
        state_bytes=sequence.state_bytes(),
        ranks=describe_ranks(config, group),
        exchange=_known_exchange(config, device, group),
    )
    return plan, model_config


def choose_device(name: str, ranks: int = 1) -> torch.device:
    """With several ranks each takes the GPU of its number on its machine."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and ranks > 1:
        name = f"cuda:{local_rank(ranks)}"
    kind = name.split(":")[0]
    if kind not in ("cpu", "cuda"):
        raise UserError(f"device={name!r} is not one of auto, cpu, cuda, cuda:N")
    if kind == "cuda" and not torch.cuda.is_available():
        raise UserError(f"device={name!r}, but torch sees no CUDA GPU here (torch {torch.__version__}); use device=cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise UserError(f"device={name!r} is not one of auto, cpu, cuda, cuda:N") from error
    if device.type == "cuda" and device.index is not None and device.index >= torch.cuda.device_count():
        raise UserError(f"device={name!r}, but there are {torch.cuda.device_count()} GPUs; ranks here: {ranks}")
    return device


def choose_dtype(name: str, stored: str, device: torch.device) -> torch.dtype:
    """auto: fp32 on the CPU, where it is exact against the references; the stored dtype on a GPU."""
    if name == "auto":
        name = stored if device.type == "cuda" and stored in DTYPES else "float32"
    return DTYPES[name]


def choose_chunk(wanted: int | str, device: torch.device) -> int:
    """auto: short passes on a CPU, so that a prompt can be given up soon; on a GPU as many rows as keep experts busy."""
    if isinstance(wanted, int):
        return wanted
    return GPU_CHUNK if device.type == "cuda" else CPU_CHUNK


def choose_context(wanted: int | None, most: int) -> int:
    if wanted is not None and wanted > most:
        raise UserError(f"context_length={wanted} is above the model's {most} positions; lower it")
    return wanted or most


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        with open("/proc/cpuinfo") as file:
            names = [line.split(":", 1)[1].strip() for line in file if line.startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else platform.processor() or platform.machine()


def num_parameters(checkpoint: Checkpoint, decoder: Decoder) -> int:
    """What is stored; of a shared model, this rank's share; of mere shapes, what is made."""
    if decoder.group.size == 1 and checkpoint.tensors:
        return sum(info.numel for info in checkpoint.tensors.values())
    return sum(weight.numel() for weight in decoder.parameters())


def parameter_bytes(checkpoint: Checkpoint, decoder: Decoder) -> int:
    """Bytes of the weights once converted to the compute dtype."""
    return num_parameters(checkpoint, decoder) * decoder.dtype.itemsize


def kept_bytes(config: EngineConfig) -> int:
    """Nothing with several ranks: their shares may differ in bytes, and then each would forget something else."""
    return config.prefix_cache_bytes if config.tensor_parallel == 1 else 0


def _known_exchange(config: EngineConfig, device: torch.device, group: Group) -> str:
    if config.tensor_parallel == 1:
        return group.exchange
    return "chosen when the ranks meet" if device.type == "cuda" else backend(device)


def measure_exchange(config: EngineConfig, device: torch.device) -> str:
    """Let the ranks meet without a model: how their sums would travel, by the times of both ways."""
    group = open_group(config.tensor_parallel, None, device, {"meet": str(device.type)})
    group.close()
    return group.exchange


def describe_ranks(config: EngineConfig, group: Group) -> str:
    if config.tp_rank_of is not None:
        return f"0 of {group.size}, alone: communication is left out and the text means nothing"
    return "1" if group.size == 1 else f"{group.rank} of {group.size}"
