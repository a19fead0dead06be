"""Answers in Python: several prompts at a time, with the drafter that is shipped for the model."""

from __future__ import annotations

from draftloop import LLM, SamplingParams

PROMPTS = ["What is the capital of France?", "Name three colours.", "What is 2 + 2?"]


def main(max_tokens: int = 48) -> None:
    spec = {"method": "eagle3", "model": "smollm2-135m-eagle3", "num_speculative_tokens": 3}
    llm = LLM("smollm2-135m", max_model_len=512, max_num_seqs=4, speculative_config=spec)
    conversations = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
    for prompt, output in zip(
        PROMPTS, llm.chat(conversations, SamplingParams(temperature=0, max_tokens=max_tokens)), strict=True
    ):
        print(f"{prompt}\n  {output.outputs[0].text}")
    speculation = llm.get_metrics()
    print(f"{speculation['mean_acceptance_length']:.2f} tokens a step")
    llm.close()


if __name__ == "__main__":
    main()
