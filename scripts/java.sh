#!/usr/bin/env bash
# Prints the JAVA_HOME of a Java that can run Spark 4.3; installs one where that is possible.
#
# Rules kept here:
#   - standard output holds the path and nothing else; all talk goes to standard error;
#   - Java 17 or 21, and with the module jdk.incubator.vector: trimmed runtimes leave it out, and
#     Spark does not start without it;
#   - the answer is kept in .venv/java-home, together with the JAVA_HOME it was found under, so that
#     setting another JAVA_HOME looks again.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
cache=.venv/java-home
asked=${JAVA_HOME-}

say() { printf 'java: %s\n' "$*" >&2; }

if [[ -f $cache ]]; then
  found='' found_for=''
  { read -r found && read -r found_for; } <"$cache" || true
  if [[ -n $found && $found_for == "$asked" && -x $found/bin/java ]]; then
    printf '%s\n' "$found"
    exit 0
  fi
fi

# One call answers both questions: the list gives java.base with the version, and the modules.
suits() {
  local modules
  [[ -x $1/bin/java ]] || return 1
  modules=$("$1/bin/java" --list-modules 2>/dev/null) || return 1
  [[ $modules =~ java\.base@(17|21)([.+-]|$'\n') && $modules == *jdk.incubator.vector@* ]]
}

# Where to look, best first. A java on PATH may be a link or a stand-in, so it is asked where it lives.
candidates() {
  if [[ -n $asked ]]; then printf '%s\n' "$asked"; fi
  if command -v java >/dev/null 2>&1; then
    java -XshowSettings:properties -version 2>&1 | sed -n 's/^ *java\.home = //p' || true
  fi
  local home
  for home in /usr/lib/jvm/*; do
    if [[ -d $home && ! -L $home ]]; then printf '%s\n' "$home"; fi
  done
}

search() {
  local home
  while IFS= read -r home; do
    if suits "$home"; then
      found=$home
      return 0
    fi
  done < <(candidates)
  return 1
}

# Debian 12 has 17; Debian 13 has 21.
install_java() {
  local package
  local -a as_root=()
  command -v apt-get >/dev/null 2>&1 || return 1
  if [[ $(id -u) -ne 0 ]]; then
    sudo -n true >/dev/null 2>&1 || return 1
    as_root=(sudo -n)
  fi
  ${as_root[@]+"${as_root[@]}"} apt-get update -qq >&2 || return 1
  for package in openjdk-17-jre-headless openjdk-21-jre-headless; do
    if apt-cache show "$package" >/dev/null 2>&1; then
      say "installing $package"
      ${as_root[@]+"${as_root[@]}"} env DEBIAN_FRONTEND=noninteractive \
        apt-get install -y -qq --no-install-recommends "$package" >&2
      return
    fi
  done
  return 1
}

found=''
if ! search; then
  say "no Java 17 or 21 with the module jdk.incubator.vector in JAVA_HOME, on PATH or under /usr/lib/jvm"
  if ! install_java || ! search; then
    say "Spark 4.3 needs one. Install a full (not trimmed) Java 17 or 21, for example with"
    say "    sudo apt-get install openjdk-17-jre-headless    (or openjdk-21-jre-headless)"
    say "or set JAVA_HOME to one that is already there, and run this again."
    exit 1
  fi
fi
if [[ -d .venv ]]; then printf '%s\n%s\n' "$found" "$asked" >"$cache"; fi
printf '%s\n' "$found"
