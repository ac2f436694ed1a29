#!/usr/bin/env bash
# Makes sure the few system programs the tests drive are there: installed when root, otherwise the command is printed.
set -euo pipefail

# program:package; strace kills a process at a chosen system call in the crash tests.
wanted=(strace:strace)

missing=()
for entry in "${wanted[@]}"; do
    command -v "${entry%%:*}" >/dev/null || missing+=("${entry##*:}")
done
[ ${#missing[@]} -eq 0 ] && exit 0

install="apt-get install --yes --no-install-recommends ${missing[*]}"
if [ "$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null; then
    echo "The tests need: ${missing[*]}. As root:  $install" >&2
    exit 1
fi
export DEBIAN_FRONTEND=noninteractive
$install || { apt-get update && $install; }
