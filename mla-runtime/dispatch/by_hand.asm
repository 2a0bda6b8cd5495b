; rustc 1.95.0
by_hand:
    push rbx
    sub rsp,0x30
    mov rbx,rdi
    cmp BYTE PTR [rdx+0x268],0x2
    jne .0
    cmp BYTE PTR [rdx+0x2b0],0x3
    je .1
    mov rax,QWORD PTR [rsi+0x8]
    mov rsi,QWORD PTR [rsi+0x28]
    mov rcx,QWORD PTR [rdx+0x208]
    mov rdi,QWORD PTR [rdx+0x270]
    mov r8,QWORD PTR [rdx+0x50]
    mov r9,QWORD PTR [rdx+0x140]
    mov [rsp],rcx
    mov [rsp+0x8],r8
    mov [rsp+0x10],r9
    mov [rsp+0x18],rdi
    mov [rsp+0x20],rax
    movdqu xmm0,XMMWORD PTR [rdx+0x1d0]
    pshufd xmm0,xmm0,0xe8
    movq [rsp+0x28],xmm0
    mov rdi,rsp
    call example_decode
    test eax,eax
    jne .2
    movabs rax,0x8000000000000005
    mov [rbx],rax
    mov rax,rbx
    add rsp,0x30
    pop rbx
    ret
.0:
    mov rdi,rbx
    mov esi,0xffffffff
    jmp .3
.1:
    mov rdi,rbx
    mov esi,0xfffffffe
    jmp .3
.2:
    mov rdi,rbx
    mov esi,eax
.3:
    call mla_dispatch::refused
    mov rax,rbx
    add rsp,0x30
    pop rbx
    ret
