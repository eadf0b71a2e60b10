"""Memory while blocks of a model come and go."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from compress.model import BlockModel

H, BLOCKS = 448, 24
STATUS = Path("/proc/self/status")


def resident() -> int:
    """Bytes of the process that lie in no file."""
    found = re.search(r"RssAnon:\s+(\d+) kB", STATUS.read_text())
    assert found is not None
    return 1024 * int(found[1])


def main(folder: Path) -> None:
    """Print by how much the process grows from the fourth block to the last, in blocks."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=H, intermediate_size=3 * H, num_hidden_layers=BLOCKS,
        num_attention_heads=7, num_key_value_heads=7, max_position_embeddings=256,
    )  # fmt: skip
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    model, ids = BlockModel(folder), torch.randint(64, (2, 256))
    hidden, sizes = model.embed(ids), []
    with torch.no_grad():
        for index, call in enumerate(model.calls(ids)):
            with model.block(index) as block:
                size = sum(p.nbytes for p in block.parameters())
                hidden = block(hidden, **call)
            sizes.append(resident())
    print((sizes[-1] - sizes[3]) / size)


@pytest.mark.skipif(not STATUS.exists(), reason="only Linux tells the resident memory")
def test_a_process_does_not_grow_with_the_blocks(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, __file__, str(tmp_path)], stdout=subprocess.PIPE, check=True
    )
    assert float(done.stdout) < 0.5


if __name__ == "__main__":
    main(Path(sys.argv[1]))
