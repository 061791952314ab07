
functions[_clinch_static]=$functions[_clinch]

# Asks clinch itself what may stand here, which knows the locks of the store. An older one does not: then the words above are offered.
_clinch() {
    local -a found names shown expl
    local one begin
    found=("${(@f)$(clinch complete -- "${(@Q)words[1,CURRENT-1]}" "${(Q)PREFIX}" 2> /dev/null)}")
    case $found[1] in
        words)
            for one in "${(@)found[2,-1]}"; do
                names+=("${one%%$'\t'*}")
                shown+=("${one/$'\t'/  -- }")
            done
            # Not _describe, which reads a backslash as a sign of its own.
            _wanted words expl word compadd -l -d shown -a names
            ;;
        files) _files ;;
        command\ *)
            begin=${found[1]#command }
            words=("${(@)words[begin+1,-1]}")
            (( CURRENT -= begin ))
            _normal -p clinch
            ;;
        *) _clinch_static "$@" ;;
    esac
}

if [ "$funcstack[1]" = "_clinch" ]; then
    _clinch "$@"
else
    compdef _clinch clinch
fi
