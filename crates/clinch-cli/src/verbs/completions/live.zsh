
functions[_clinch_static]=$functions[_clinch]

# Asks clinch itself what may stand here, which knows the locks of the store. An older one does not: then the words above are offered.
_clinch() {
    local -a found described
    local one begin
    found=("${(@f)$(clinch complete -- "${(@Q)words[1,CURRENT-1]}" "${(Q)PREFIX}" 2> /dev/null)}")
    case $found[1] in
        words)
            for one in "${(@)found[2,-1]}"; do
                described+=("${${one%%$'\t'*}//:/\\:}:${one#*$'\t'}")
            done
            _describe 'word' described
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
