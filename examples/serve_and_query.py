"""A server, and OpenAI's client of it (pip install 'draftloop[serve]' openai)."""

from __future__ import annotations

import subprocess
import sys
import time
import urllib.error
import urllib.request

import openai

PORT = 8011


def ask(url: str) -> None:
    """Stream an answer of the server at `url`."""
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none") as client:
        model = next(iter(client.models.list())).id
        messages = [{"role": "user", "content": "What is the capital of France? One sentence."}]
        for chunk in client.chat.completions.create(
            model=model, messages=messages, max_completion_tokens=32, temperature=0, stream=True
        ):
            print(chunk.choices[0].delta.content or "", end="", flush=True)
    print()


def main() -> None:
    url = f"http://127.0.0.1:{PORT}"
    command = [sys.executable, "-m", "draftloop", "serve", "smollm2-135m", "--port", str(PORT)]
    with subprocess.Popen(command) as server:
        try:
            while not is_healthy(url):
                if server.poll() is not None:
                    raise SystemExit("the server did not start")
                time.sleep(0.2)
            ask(url)
        finally:
            server.terminate()


def is_healthy(url: str) -> bool:
    try:
        return urllib.request.urlopen(f"{url}/health", timeout=5).status == 200
    except (urllib.error.URLError, ConnectionError):
        return False


if __name__ == "__main__":
    main()
