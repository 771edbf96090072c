# Completion for ddpexp. In ~/.bashrc:  eval "$(ddpexp completion bash)"
_ddpexp_ask() {
  compopt -o nospace +o default +o bashdefault +o filenames 2>/dev/null
  mapfile -t COMPREPLY < <(
    _DDPEXP_LINE="${COMP_LINE:0:COMP_POINT}" _DDPEXP_BREAKS="$COMP_WORDBREAKS" "$@" completion bash 2>/dev/null </dev/null
  )
}
_ddpexp() {
  _ddpexp_ask "${1/#\~\//$HOME/}"
}
declare -gA _ddpexp_before
_ddpexp_python() {
  if [[ ${COMP_LINE:0:COMP_POINT} =~ [[:space:]]-m[[:space:]]+ddpexp[[:space:]] ]]; then
    _ddpexp_ask "${1/#\~\//$HOME/}" -m ddpexp
  elif [[ -n ${_ddpexp_before[${1##*/}]-} ]]; then
    "${_ddpexp_before[${1##*/}]}" "$@"
  fi
}
_ddpexp_register() {
  complete -F _ddpexp ddpexp
  local name spec
  for name; do
    if ! complete -p "$name" >/dev/null 2>&1 && declare -F _completion_loader >/dev/null; then
      _completion_loader "$name" >/dev/null 2>&1
    fi
    spec=$(complete -p "$name" 2>/dev/null)
    if [[ $spec == *' -F _ddpexp_python '* ]]; then
      continue
    elif [[ $spec =~ \ -F\ ([^[:space:]]+)\  ]]; then
      _ddpexp_before[$name]=${BASH_REMATCH[1]}
      eval "${spec/ -F "${BASH_REMATCH[1]}" / -F _ddpexp_python }"
    elif [[ -z $spec ]]; then
      complete -o bashdefault -o default -F _ddpexp_python "$name"
    fi
  done
}
_ddpexp_register @PYTHONS@
unset -f _ddpexp_register
