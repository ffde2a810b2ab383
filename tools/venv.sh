#!/usr/bin/env bash
# Makes the development environment, or brings it up to date.
#   venv.sh DIR [PYTHON]   DIR is the virtual environment; PYTHON is tried first, then the usual names
# Does nothing where pyproject.toml, constraints.txt and the place are those of the last time.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
venv=${1:?folder of the virtual environment}

# The folder is part of the stamp: the scripts of an environment that was copied or moved point to the old place.
stamp=$({ pwd; cat pyproject.toml constraints.txt; } | sha256sum | cut -d' ' -f1)
[[ -x $venv/bin/python && "$(cat "$venv/.installed" 2>/dev/null)" == "$stamp" ]] && exit 0

new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; }
python=""
for candidate in "${2:-}" python3.11 python3 python3.12 python3.13; do
  if [[ -n $candidate ]] && new_enough "$candidate"; then python=$candidate; break; fi
done
if [[ -z $python ]]; then
  echo "nbddp needs Python 3.11 or newer, and none was found. Install one, or name it: make PYTHON=/path/to/python3.11 ..." >&2
  exit 1
fi

# Debian and Ubuntu ship venv's bootstrap in a package of its own.
if ! "$python" -c 'import ensurepip' >/dev/null 2>&1; then
  tools/apt.sh "$("$python" -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])')"
fi

if [[ ! -x $venv/bin/python ]] || [[ "$(cat "$venv/.place" 2>/dev/null || pwd)" != "$PWD" ]]; then
  rm -rf "$venv"
  "$python" -m venv "$venv"
fi
pwd >"$venv/.place"
rm -f "$venv/.installed"
"$venv/bin/python" -m pip install --disable-pip-version-check --quiet -c constraints.txt -e '.[dev]'
echo "$stamp" >"$venv/.installed"
