#!/usr/bin/env bash
# Installs Debian and Ubuntu packages: those named, or, without arguments, what the tests use and this machine lacks.
# Root or sudo without a password is used where there is one. What can't be installed here is said, and is no error:
# the tests that need it are skipped, with the reason in pytest's summary.
set -euo pipefail

packages=("$@")
if [[ $# -eq 0 ]]; then
  want() { command -v "$1" >/dev/null 2>&1 || [[ -x /usr/sbin/$1 ]] || packages+=("${@:2}"); }
  [[ -n ${NBDDP_CHROMIUM:-} ]] || want chromium chromium fonts-dejavu-core
  want slurmctld slurm-wlm slurmctld
  want slurmd slurmd
  want srun slurm-client
  want munged munge
  want ss iproute2
  want g++ g++  # torch.compile on the CPU
fi
[[ ${#packages[@]} -eq 0 ]] && exit 0

admin=()
if ! command -v apt-get >/dev/null 2>&1; then
  echo "Not installed, for want of apt-get: ${packages[*]}" >&2
  exit 0
elif [[ $(id -u) -ne 0 ]]; then
  if ! sudo -n true >/dev/null 2>&1; then
    echo "Not installed, for want of root or sudo: apt-get install ${packages[*]}" >&2
    exit 0
  fi
  admin=(sudo -n)
fi

echo "apt-get install ${packages[*]}"
apt() { "${admin[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -qq -o DPkg::Lock::Timeout=300 "$@" </dev/null; }
log=$(mktemp)
trap 'rm -f "$log"' EXIT
if ! { apt update && apt install -y --no-install-recommends "${packages[@]}"; } >"$log" 2>&1; then
  tail -n 20 "$log" >&2
  echo "Not installed: ${packages[*]}" >&2
fi
