"""Fill the masked spans of a text: python -m nanoT5.fill RUN "Thank you <extra_id_0> me to your <extra_id_1>."

RUN is a run folder, or a model folder in Transformers' format. Without texts, lines are read from standard input.
"""

import argparse
import re
import sys
from pathlib import Path
from typing import NamedTuple

import torch

from nanoT5 import UserError, script

LONGEST = 32  # tokens of a span


class Span(NamedTuple):
    text: str
    probability: float  # of all its tokens and of its end, as the model predicts them one after the other


def load(path: Path):
    """(model, tokenizer) of a run or a model folder."""
    from transformers import AutoModelForSeq2SeqLM, AutoTokenizer
    from transformers.utils import logging

    logging.set_verbosity_error()  # it would say that the output head is not the embedding, as it has to be
    logging.disable_progress_bar()
    folder = path / "model" if (path / "model").is_dir() else path
    if not (folder / "config.json").exists():
        raise UserError(f"{path} holds no trained model: name a finished run's folder, or its model/")
    return AutoModelForSeq2SeqLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)


@torch.no_grad()
def fill(model, tokenizer, text: str) -> list[Span]:
    """The likeliest next token again and again for each of <extra_id_0>, <extra_id_1>, ..., which text has in order.

    A span ends where the model predicts another sentinel or the end of the text.
    """
    count = len(re.findall(r"<extra_id_\d+>", text))
    names = [f"<extra_id_{k}>" for k in range(count)]
    if not count or re.findall(r"<extra_id_\d+>", text) != names:
        raise UserError(
            f"{text!r} has to mark what is to be filled, in this order, with <extra_id_0>, <extra_id_1>, ..."
        )
    sentinels = tokenizer.convert_tokens_to_ids(names)
    if tokenizer.unk_token_id in sentinels:
        raise UserError(f"{count} spans are more than this model's tokenizer has sentinels for")
    ends = {i for token, i in tokenizer.get_added_vocab().items() if token.startswith("<extra_id_")}
    ends.add(tokenizer.eos_token_id)

    memory = model.get_encoder()(**tokenizer(text, return_tensors="pt"))
    written, spans = [model.config.decoder_start_token_id], []
    for sentinel in sentinels:
        written.append(sentinel)
        tokens, probability = [], 1.0
        while len(tokens) < LONGEST:
            logits = model(encoder_outputs=memory, decoder_input_ids=torch.tensor([written])).logits[0, -1]
            likeliest = logits.softmax(-1).max(-1)
            probability *= likeliest.values.item()
            if likeliest.indices.item() in ends:
                break
            tokens.append(likeliest.indices.item())
            written.append(tokens[-1])
        spans.append(Span(tokenizer.decode(tokens), probability))
    return spans


def command_line() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("texts", nargs="*", metavar="text")
    arguments = parser.parse_args()
    model, tokenizer = load(arguments.run)
    for text in arguments.texts or map(str.rstrip, sys.stdin):
        spans = fill(model, tokenizer, text)
        for k, span in enumerate(spans):
            text = text.replace(f"<extra_id_{k}>", f"[{span.text}]", 1)
        print(text)
        for k, span in enumerate(spans):
            print(f"  <extra_id_{k}> {span.probability:.2g} {span.text}")


if __name__ == "__main__":
    script(command_line)
