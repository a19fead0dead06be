"""An answer that fits a JSON schema, whatever is drafted (pip install 'draftloop[grammar]')."""

from __future__ import annotations

import json

from draftloop import LLM, SamplingParams

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Paris", "Rome", "Oslo"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 7},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}


def main() -> None:
    spec = {"method": "ngram", "num_speculative_tokens": 4}
    llm = LLM("smollm2-135m", max_model_len=512, max_num_seqs=1, speculative_config=spec)
    params = SamplingParams(temperature=0, max_tokens=100, structured_outputs={"json": SCHEMA})
    (output,) = llm.chat([{"role": "user", "content": "The weather in Rome for 3 days, please."}], params)
    print(json.loads(output.outputs[0].text))
    llm.close()


if __name__ == "__main__":
    main()
