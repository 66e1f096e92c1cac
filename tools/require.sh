#!/usr/bin/env bash
# Say in one line what this machine lacks. `require.sh python` prints the interpreter it found.
set -u

fail() { echo "flinkish_spark: $*" >&2; exit 1; }

find_python() {
    local candidate
    for candidate in ${PYTHON:-python3 python3.11 python3.12 python3.13 python3.14 python}; do
        "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || continue
        "$candidate" -c 'import venv, ensurepip' 2>/dev/null ||
            fail "$candidate has no venv module: install it (package \`python3-venv\`)"
        command -v "$candidate"
        return
    done
    fail "Python 3.11 or newer is missing: install it, or name one: make PYTHON=/path/to/python3.11"
}

# "17.0.15" is 17; "1.8.0_392" is 8.
java_major() { "$1" -version 2>&1 | sed -n 's/.*version "\(1\.\)\{0,1\}\([0-9]*\).*/\2/p' | head -1; }

check_java() {
    local java=${JAVA_HOME:+$JAVA_HOME/bin/}java major
    local hint="install a JDK 17 (package \`openjdk-17-jdk-headless\`) and put it on the PATH or set JAVA_HOME"
    command -v "$java" >/dev/null || fail "Java 17 or newer is missing ($java not found): $hint"
    major=$(java_major "$java")
    [ "${major:-0}" -ge 17 ] || fail "Java 17 or newer is needed, $java is ${major:-unknown}: $hint"
    command -v "${java}c" >/dev/null || fail "$java is a runtime without a compiler: $hint"
}

check_maven() {
    command -v mvn >/dev/null || fail "Maven is missing: install it (package \`maven\`) so that \`mvn\` is on the PATH"
}

check_openssl() {
    command -v openssl >/dev/null || fail "openssl is missing, which makes the tests' certificates: install it (package \`openssl\`)"
}

case ${1:-} in
    python) find_python ;;
    java) check_java ;;
    maven) check_maven ;;
    openssl) check_openssl ;;
    *) fail "usage: tools/require.sh python|java|maven|openssl" ;;
esac
