#!/usr/bin/env bash
# Installs Chromium where root runs Debian or Ubuntu and has none; elsewhere the tests of the page say what they miss.
set -euo pipefail

for name in chromium chromium-browser google-chrome; do
  command -v "$name" >/dev/null && exit 0
done
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
  echo "No Chromium found: the tests of the server's page will be skipped (Debian: apt install chromium)"
  exit 0
fi
echo "Installing Chromium for the tests of the server's page"
export DEBIAN_FRONTEND=noninteractive
log="$(mktemp)"
if ! { apt-get update && apt-get install --yes --no-install-recommends chromium; } >"$log" 2>&1; then
  tail -n 5 "$log" >&2
  echo "Chromium could not be installed: the tests of the server's page will be skipped" >&2
fi
rm -f "$log"
