"""A language model of transformers, and windows of the tokens of a text file.
Called by the command line's `sensitivity` and `convert --calibrate`; calls transformers, and checkpoint.files to find
the model.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from thunder_moe.checkpoint.files import find_checkpoint
from thunder_moe.formats.checks import require_device


def load_model(name: str, dtype: str, device: str) -> Any:
    """Load the model of a directory, or of the hub's local cache, onto a device; `dtype` as in ``from_pretrained``."""
    path = find_checkpoint(name, argument="MODEL")
    place = require_device("--device", device)
    config = transformers.AutoConfig.from_pretrained(path)
    own = next(iter(config.architectures or ()), "")
    loader: Any = getattr(transformers, own, transformers.AutoModelForCausalLM)
    return loader.from_pretrained(path, dtype=dtype).to(place).eval()


def token_windows(name: str, data: str, tokens: int, context: int, argument: str = "--data") -> Tensor:
    """Return the first tokens of a text as rows of `context`, each begun by the tokenizer's first token if it sets one.

    Args:
        name: of the model, as in `load_model`.
        data: path of a text file, UTF-8; `argument` is its name in messages.
        tokens: at most so many.
        context: length of a row.

    Returns:
        int64 (tokens // context, context), or fewer rows of a shorter text; what does not fill one is left out.

    Raises:
        FileNotFoundError: no such model or text.
        ValueError: the text is no UTF-8 or shorter than two rows, the tokenizer has no vocabulary, `context` is below 2
            or more than the model has positions, or `tokens` is less than two rows.
    """
    model = find_checkpoint(name, argument="MODEL")
    config = transformers.AutoConfig.from_pretrained(model).get_text_config()
    most = getattr(config, "max_position_embeddings", None) or context
    if not 2 <= context <= most:
        raise ValueError(f"--context: got {context}, wanted 2 to {most} (the model's max_position_embeddings)")
    if tokens < 2 * context:
        raise ValueError(f"--tokens: got {tokens}, wanted {2 * context} or more, two rows of --context {context}")
    if not Path(data).is_file():
        raise FileNotFoundError(f"{argument}: no file {data!r}, wanted a text file")
    try:
        text = Path(data).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{argument}: {data!r} is no UTF-8 text ({error}), wanted one") from error
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(model)
    first = tokenizer.bos_token_id
    begin = [first] if first is not None and tokenizer("a").input_ids[:1] == [first] else []
    own = context - len(begin)
    count = tokens // context * own
    # The tokens of no text have more characters on average.
    ids = tokenizer(text[: 32 * count], add_special_tokens=False, verbose=False).input_ids[:count]
    if text.strip() and set(ids) <= {tokenizer.unk_token_id}:  # transformers makes one without a vocabulary, too
        wanted = "wanted the model's tokenizer files beside its weights"
        raise ValueError(f"MODEL: the tokenizer of {name!r} knows no word of {data!r}, {wanted}")
    rows = len(ids) // own
    if rows < 2:
        raise ValueError(
            f"{argument}: {data!r} has {len(ids)} tokens, wanted {2 * own} or more: a longer text, or a smaller"
            " --context"
        )
    windows = torch.tensor(ids[: rows * own], dtype=torch.int64).view(rows, own)
    windows = torch.cat([torch.tensor(begin, dtype=torch.int64).expand(rows, -1), windows], 1)
    if int(windows.max()) >= config.vocab_size:
        raise ValueError(
            f"MODEL: the tokenizer of {name!r} has a token {int(windows.max())}, the model a vocabulary of"
            f" {config.vocab_size}; wanted the model's own tokenizer"
        )
    return windows
