// Position of a token in a paged cache.
#pragma once

namespace mla {

struct PagePosition {
    int page;    // -1 if there is none
    int offset;  // tokens before this one in the page
};

}  // namespace mla
