#!/usr/bin/env bash
# Makes .venv, holding exactly what requirements-dev.txt pins plus this project in editable form.
#
# Rules kept here:
#   - nothing to do means: no output, no work beyond hashing two small files;
#   - everything installed is checked against a pinned hash (pyspark is published as source only: the
#     installer fetches the build tool for that one by itself, and does not keep it);
#   - each line of the stamp is written after the stage it stands for, so an interrupted stage is
#     repeated, never trusted;
#   - changed pins rebuild .venv from nothing; a changed pyproject.toml alone reinstalls the project.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
root=$PWD
venv=$root/.venv
stamp=$venv/setup-stamp

say() { printf 'setup: %s\n' "$*" >&2; }
die() { say "$*"; exit 1; }

digest() {
  if command -v sha256sum >/dev/null 2>&1; then sha256sum; else shasum -a 256; fi | cut -d' ' -f1
}

# The root is part of the first digest: the scripts inside a virtual environment hold its full path,
# so one that was copied or moved along with the directory has to be made again.
pins=$( { printf '%s\n' "$root"; cat requirements-dev.txt; } | digest)
project=$(digest <pyproject.toml)

have_pins='' have_project=''
if [[ -x $venv/bin/python && -f $stamp ]]; then
  { read -r have_pins; read -r have_project; } <"$stamp" || true
fi
if [[ $have_pins == "$pins" && $have_project == "$project" ]]; then exit 0; fi

# Prints the path of a usable interpreter. A name on PATH is not enough: version managers put stand-ins
# there that fail when run.
find_python() {
  local name
  for name in python3.13 python3.12 python3.11 python3; do
    if "$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then
      "$name" -c 'import sys; print(sys.executable)'
      return
    fi
  done
  return 1
}

# Debian and its relatives leave ensurepip out of the interpreter's own package.
ensure_venv_module() {
  local python=$1 package
  if "$python" -Im ensurepip --version >/dev/null 2>&1; then return; fi
  package=$("$python" -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])')
  if [[ $(id -u) -eq 0 ]] && command -v apt-get >/dev/null 2>&1; then
    say "installing $package"
    apt-get update -qq >&2
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$package" >&2 ||
      die "could not install $package; install it by hand, or put uv on PATH, and run this again"
  else
    die "$python cannot make virtual environments; run 'apt-get install $package' (or python3-venv), or put uv on PATH"
  fi
}

if command -v uv >/dev/null 2>&1; then tool=uv; else tool=pip; fi

install() {
  if [[ $tool == uv ]]; then
    VIRTUAL_ENV=$venv uv pip install --quiet "$@"
  else
    "$venv/bin/python" -m pip --disable-pip-version-check install -qq "$@"
  fi
}

if [[ $have_pins != "$pins" ]]; then
  python=$(find_python) ||
    die "no Python 3.11 or newer found; install one (on Debian: apt-get install python3 python3-venv) and run this again"
  if [[ $tool == pip ]]; then ensure_venv_module "$python"; fi
  say "making .venv with $("$python" --version) and $tool"
  rm -rf "$venv"
  if [[ $tool == uv ]]; then uv venv --quiet --python "$python" "$venv"; else "$python" -m venv "$venv"; fi
  say "installing the pinned requirements (the first time takes a few minutes)"
  install --require-hashes -r requirements-dev.txt
  printf '%s\n' "$pins" >"$stamp"
elif [[ $tool == pip && ! -x $venv/bin/pip ]]; then
  "$venv/bin/python" -Im ensurepip >/dev/null # .venv was made by uv, which has since gone from PATH
fi
say "installing millstream in editable form"
install --no-deps --no-build-isolation -e .
printf '%s\n%s\n' "$pins" "$project" >"$stamp"
