#!/bin/sh
# Builds the C engine with its driver under each sanitizer that the compiler has, and runs it.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
out=${1:-build/sanitize}
cc=${CC:-cc}
mkdir -p "$out"
command -v "$cc" >/dev/null || { echo "skipped: no C compiler ($cc)"; exit 0; }

# ThreadSanitizer wants addresses where it expects them.
steady=""
if command -v setarch >/dev/null && setarch -R true 2>/dev/null; then steady="setarch -R"; fi

try() { # name, flags
    echo 'int main(void) { return 0; }' >"$out/try.c"
    if ! "$cc" $2 -o "$out/try" "$out/try.c" 2>/dev/null || ! $steady "$out/try" 2>/dev/null; then
        echo "$1: skipped, since $cc has no runtime for $2 here"
        return
    fi
    echo "$1:"
    "$cc" -O1 -g -std=gnu11 -fwrapv -fno-math-errno -ffp-contract=off -fno-omit-frame-pointer -Wall -Wextra \
        -Wno-unknown-pragmas $2 -pthread -o "$out/$1" "$here/driver.c"
    $steady "$out/$1"
    echo "$1: nothing found"
}

export ASAN_OPTIONS=detect_leaks=1:strict_string_checks=1 UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1
export TSAN_OPTIONS=halt_on_error=1:second_deadlock_stack=1
try address "-fsanitize=address,undefined -fno-sanitize-recover=undefined"
# It does not know fences, and nothing here depends on its knowing them.
try thread "-fsanitize=thread -Wno-tsan"
